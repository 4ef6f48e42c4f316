"""The trainer: asynchronous GRPO on verified rollouts. Reading map, in the order of the data:

cli.py          the program `intellect-trainer`
config.py       settings and recipes
models/         where version 0 of the policy comes from
data.py         batch files -> groups of a step; journal.py: exactly once, whatever happens
advantage.py    rewards -> advantages, online filter
packing.py      rows -> tensors;  policy.py: tensors -> log-probs;  loss.py: the loss
learner.py      one step: optimizer updates on the policy
loop.py         the run: wait, train, hand over to publication, repeat
publish.py      weights -> signed checkpoint;  resume.py: everything -> resume checkpoint
session.py      all of these, opened for one run;  layout.py, files.py: names and writing of files
evaluation.py   held-out tasks, with generation.py;  metrics.py: figures for people
seeder.py       a process of its own: records published checkpoints on the ledger and serves them
"""

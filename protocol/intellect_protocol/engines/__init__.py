"""Engines: generate and score with a policy, in a child process that may die.

Read `base` for the interface, then `supervisor` (what the rest of the project uses), `child` (the
process it starts) and `torch_engine` (the default engine) with `model` (its decoder), `generation`
(continuous batching) and `scoring` (the validator's prefill).
"""

"""What all sides of a run must agree on.

Reading order: `run` (the configuration and its id), `keys`, `wire` and `messages` (who says what),
`assignment`, `sampling` and `toploc` (what a node must generate and how it proves it), `rollouts`
and `checkpoint` (the files), `validation` (the checks). `engines` and `environments` produce and
score rollouts; `network` and `ledger` wrap the outside world. Nothing here imports node,
coordinator or trainer.
"""

__version__ = "0.1.0"

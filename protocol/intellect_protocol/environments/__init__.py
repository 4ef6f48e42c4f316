"""Environments: tasks, their splits and their rewards.

Read `base` for what an environment is and how problems follow from an index, then one file per
task; `registry.make` finds them by the name in the run configuration. `prompts` turns problems into
token ids and completions back into text; `tasks` puts both together for a run.
"""

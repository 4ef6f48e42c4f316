"""The whole swarm on one machine, every role a process of its own.

Reading order: `cli` (options), `up` (the life of a devnet), `layout` and `setup` (what is made
once), `roles` and `processes` (what runs), `snapshot`, `view` and `summary` (what is shown),
`cheats` and `cheat_node` (the dishonest nodes, reachable from nowhere else).
"""

"""The kinds of cheat a devnet can run; see `cheats` for what each does."""

CHEAT_KINDS = (
    "wrong-model",
    "edited-tokens",
    "forged-reward",
    "best-of-n",
    "constant-proof",
    "replayed-proof",
)

"""Keys of development chains. They are derived from a phrase that everybody knows: worth nothing anywhere.

Never send anything of value to them: on public chains, programs empty these accounts within seconds.
"""

from __future__ import annotations

from functools import cache

from ..keys import LocalSigner

# The phrase that development chains (anvil, hardhat) share by convention.
DEVELOPMENT_MNEMONIC = "test test test test test test test test test test test junk"
DEVELOPMENT_ACCOUNTS = 20


@cache
def development_signer(index: int) -> LocalSigner:
    """Key `index` (0 to 19) of the public development phrase (BIP-39, BIP-44 path m/44'/60'/0'/0/index).

    Raises:
        ValueError: no such account.
    """
    from eth_account.hdaccount import key_from_seed, seed_from_mnemonic

    if not 0 <= index < DEVELOPMENT_ACCOUNTS:
        raise ValueError(f"there are {DEVELOPMENT_ACCOUNTS} development accounts")
    seed = seed_from_mnemonic(DEVELOPMENT_MNEMONIC, "")
    return LocalSigner(bytes(key_from_seed(seed, f"m/44'/60'/0'/0/{index}")))

"""Deploying the contracts, and the file that says where they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, LedgerError
from ..keys import Signer, address_bytes, checksum_address
from .artefacts import CONTRACTS, TOKEN

if TYPE_CHECKING:
    from .sending import TransactionQueue

TOKEN_UNIT = 10**18
BURN_ADDRESS = "0x000000000000000000000000000000000000dEaD"
_MAX_FILE_BYTES = 64 * 1024
_DAY_S = 24 * 3600


class LedgerParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is fixed for ever when the contracts are deployed. Amounts in units of 10^-18 token.

    The defaults are for a public chain. The constructors of the contracts enforce
    `window_s + voting_s < unbonding_s`, the same against `set_change_s`, and a cut of at most 10 %.
    """

    validators: tuple[str, ...]
    coordinator: str
    token: str | None = None  # None deploys the development token
    sink: str = BURN_ADDRESS
    window_s: int = 3 * _DAY_S
    voting_s: int = 3 * _DAY_S
    unbonding_s: int = 14 * _DAY_S
    set_change_s: int = 21 * _DAY_S
    void_window_s: int = 3 * _DAY_S
    cap_period_s: int = 7 * _DAY_S
    min_stake: int = 1_000 * TOKEN_UNIT
    bond: int = 100 * TOKEN_UNIT
    fraud_cap: int = 1_000 * TOKEN_UNIT
    equivocation_cap: int = 1_000 * TOKEN_UNIT
    account_cap: int = 10_000 * TOKEN_UNIT
    # 0: the accuser gains nothing. At most 1,000 (10 %).
    reporter_cut_bps: int = 0

    @classmethod
    def development(
        cls, *, validators: Sequence[str], coordinator: str, window_s: int = 6, voting_s: int = 120
    ) -> LedgerParameters:
        """Delays short enough to see a whole case in one sitting; unbonding takes ten minutes more."""
        case_s = window_s + voting_s
        return cls(
            validators=tuple(validators),
            coordinator=coordinator,
            window_s=window_s,
            voting_s=voting_s,
            unbonding_s=case_s + 600,
            set_change_s=case_s + 900,
            void_window_s=case_s,
            cap_period_s=3600,
        )


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the contracts are: EIP-55 addresses by name (`Token` holds the stake), and the first block."""

    chain_id: int
    contracts: dict[str, str]
    block: int

    def address(self, name: str) -> str:
        """Address of a contract by name."""
        return self.contracts[name]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> Deployment:
        """Read and check the file.

        Raises:
            ConfigError: missing, malformed, or not all contracts are in it.
        """
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: too large for a deployment file")
        try:
            deployment = msgspec.json.decode(content, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: not a deployment file: {error}") from error
        deployment.check(str(path))
        return deployment

    def check(self, source: str) -> None:
        """
        Raises:
            ConfigError: not the contracts of a deployment; `source` is named as the origin.
        """
        expected = {*CONTRACTS, TOKEN}
        if set(self.contracts) != expected:
            raise ConfigError(f"{source}: a deployment has the contracts {', '.join(sorted(expected))}")
        for name, address in self.contracts.items():
            try:
                ok = checksum_address(address_bytes(address)) == address
            except Exception:
                ok = False
            if not ok:
                raise ConfigError(f"{source}: {name} is not a checksummed address: {address[:64]!r}")


async def deploy(queue: TransactionQueue, signer: Signer, parameters: LedgerParameters) -> Deployment:
    """Deploy all contracts from the key of `signer` and say where they are.

    The stake ledger and the court name each other as immutables, so the court's address is computed from
    the nonce its creation will have; the court's constructor refuses if that went wrong.

    Raises:
        LedgerError: a constructor refused the parameters, or the key was used elsewhere meanwhile.
        UnreachableError: no answer from the chain.
    """
    from eth_hash.auto import keccak
    from rlp import encode as rlp_encode  # type: ignore[import-untyped]

    validators = sorted(parameters.validators, key=address_bytes)
    nonce = await queue.next_nonce(signer.address)
    court_nonce = nonce + (3 if parameters.token else 4)
    court = checksum_address(bytes(keccak(rlp_encode([address_bytes(signer.address), court_nonce]))[12:]))
    addresses: dict[str, str] = {}
    first_block: int | None = None

    async def create(name: str, *arguments: Any) -> None:
        nonlocal first_block
        receipt = await queue.create(signer, name, *arguments)
        assert receipt.contract is not None
        addresses[name] = receipt.contract
        if first_block is None:
            first_block = receipt.block_number

    if parameters.token is None:
        await create(TOKEN)
    else:
        addresses[TOKEN] = checksum_address(address_bytes(parameters.token))
    await create("ValidatorSet", validators, parameters.set_change_s)
    await create(
        "StakeLedger",
        addresses[TOKEN],
        court,
        parameters.sink,
        parameters.unbonding_s,
        parameters.min_stake,
        parameters.reporter_cut_bps,
    )
    await create("NodeRegistry", court)
    await create(
        "SlashCourt",
        addresses["StakeLedger"],
        addresses["ValidatorSet"],
        (
            parameters.window_s,
            parameters.voting_s,
            parameters.bond,
            parameters.fraud_cap,
            parameters.equivocation_cap,
            parameters.account_cap,
            parameters.cap_period_s,
        ),
    )
    if addresses["SlashCourt"] != court:
        raise LedgerError("the deploying key was used elsewhere meanwhile; deploy again")
    await create("WorkLedger", addresses["ValidatorSet"], parameters.coordinator, parameters.void_window_s)
    assert first_block is not None
    return Deployment(await queue.chain_id(), addresses, first_block)

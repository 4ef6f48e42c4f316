"""Who a node is: its wallet, node key and peer key, and their entry in the registry.

The wallet owns the stake and is opened only to register. The node key signs work, the peer key is the
libp2p identity; both live in the data directory, made on first use. One process at a time works with
them: the directory is locked for as long as it runs.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from intellect_protocol.errors import (
    BindingError,
    PreflightError,
    SlashedError,
    UnreachableError,
    UsageError,
    WalletError,
)
from intellect_protocol.file_lock import FileLock, lock, try_lock
from intellect_protocol.keys import LocalSigner, PeerKey, Signer, load_keystore, load_or_create_node_key
from intellect_protocol.ledger.records import NodeBinding, Receipt, StakeAccount

from .config import show_tokens

LOCK_FILE = "node.lock"
_MAX_PASSWORD_BYTES = 4096
# Longer than `is_running` of another process holds the lock while it looks.
_LOCK_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Identity:
    """The keys of one node, and the lock on its data directory."""

    wallet: LocalSigner
    node: LocalSigner
    peer: PeerKey
    lock: FileLock


def read_password(
    password_file: Path | None, prompt: str = "Password: ", environ: Mapping[str, str] | None = None
) -> str:
    """The passphrase: from `password_file`, else INTELLECT_PASSWORD_FILE, else a prompt on the terminal.

    One trailing line break of a file is not part of it.

    Raises:
        WalletError: the file cannot be read, or there is neither a file nor a terminal.
    """
    named = (environ if environ is not None else os.environ).get("INTELLECT_PASSWORD_FILE")
    path = password_file or (Path(named).expanduser() if named else None)
    if path is None:
        if not sys.stdin.isatty():
            raise WalletError("no password: give --password-file or INTELLECT_PASSWORD_FILE")
        return getpass.getpass(prompt)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_PASSWORD_BYTES + 1)
        if len(content) > _MAX_PASSWORD_BYTES:
            raise WalletError(f"{path}: too large for a password file")
        return content.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise WalletError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise WalletError(f"{path}: the password is not UTF-8 text") from None


def new_password(password_file: Path | None) -> str:
    """The passphrase of a wallet in the making; asked twice on a terminal.

    Raises:
        WalletError: as `read_password`, empty, or the two entries differ.
    """
    password = read_password(password_file, "New password: ")
    if not password:
        raise WalletError("the password is empty")
    asked = password_file is None and "INTELLECT_PASSWORD_FILE" not in os.environ
    if asked and getpass.getpass("Again: ") != password:
        raise WalletError("the passwords differ; nothing was written")
    return password


def open_wallet(wallet: Path | None, password_file: Path | None) -> LocalSigner:
    """Unlock the wallet.

    Raises:
        WalletError: none was named, it does not exist or is damaged, or the password is wrong.
    """
    if wallet is None:
        raise WalletError("no wallet: give --wallet FILE ('intellect-node wallet new FILE' makes one)")
    if not wallet.exists():
        raise WalletError(f"{wallet}: no such file ('intellect-node wallet new FILE' makes a wallet)")
    return load_keystore(wallet, read_password(password_file, f"Password of {wallet}: "))


def lock_data_dir(data_dir: Path) -> FileLock:
    """The lock that keeps a second node out of a data directory.

    Raises:
        PreflightError: another process holds it, or it cannot be made.
    """
    try:
        return lock(data_dir / LOCK_FILE, timeout_s=_LOCK_TIMEOUT_S)
    except OSError as error:
        raise PreflightError(f"{data_dir}: {error.strerror or error}") from error
    except UnreachableError:
        raise PreflightError(
            f"a node is already running in {data_dir}; a second one with the same key could sign "
            "contradicting work: stop it first, or choose another --data-dir"
        ) from None


def open_identity(data_dir: Path, wallet: LocalSigner, tell: Callable[[str], None]) -> Identity:
    """Lock the data directory and open its keys, made on first use and told so.

    Raises:
        PreflightError: another node runs here.
        WalletError: a key file is damaged or cannot be written.
    """
    held = lock_data_dir(data_dir)
    try:
        node, created = load_or_create_node_key(data_dir / "node.key")
        peer = PeerKey.load_or_create(data_dir / "peer.key")
    except BaseException:
        held.release()
        raise
    if created:
        tell(f"made a node key, {node.address}, in {data_dir / 'node.key'}: it signs work, not transfers")
    return Identity(wallet, node, peer, held)


class Registry(Protocol):
    """What of `ledger.Ledger` registering needs."""

    async def node(self, node: str) -> NodeBinding | None: ...
    async def nodes_of(self, owner: str) -> tuple[str, ...]: ...
    async def account(self, owner: str) -> StakeAccount: ...
    async def min_stake(self) -> int: ...
    async def token_balance(self, address: str) -> int: ...
    async def balance(self, address: str) -> int: ...
    async def is_barred(self, owner: str) -> bool: ...
    async def stake(self, signer: Signer, amount: int, *, intent: str | None = None) -> Receipt: ...
    async def bind_node(self, owner: Signer, node: Signer, peer_id: bytes) -> Receipt: ...
    async def unbind_node(self, signer: Signer, node: str) -> Receipt: ...


async def register(
    ledger: Registry, identity: Identity, stake: int | None, tell: Callable[[str], None]
) -> int:
    """Stake what is missing and bind the node key; nothing is sent if both are done already.

    Args:
        stake: tokens (10^-18) to stake if the wallet's stake is below what its nodes need; None: what
            is missing.

    Returns:
        The block since which the node is entitled to work.

    Raises:
        SlashedError: the wallet is barred for fraud.
        BindingError: the node key is bound to another wallet.
        UsageError: `stake` is less than what is missing.
        WalletError: the wallet cannot pay.
    """
    wallet, node = identity.wallet, identity.node
    if await ledger.is_barred(wallet.address):
        raise SlashedError(
            "barred", f"wallet {wallet.address} is barred: a fraud of one of its nodes was upheld"
        )
    binding = await ledger.node(node.address)
    if binding is not None and binding.owner != wallet.address:
        raise BindingError(
            f"node key {node.address} is bound to wallet {binding.owner}, not to {wallet.address}: use that "
            "wallet, or another --data-dir for a new node key"
        )
    nodes = set(await ledger.nodes_of(wallet.address)) | {node.address}
    since = await _stake_missing(ledger, wallet, len(nodes), stake, tell)
    if binding is not None and binding.peer_id != identity.peer.peer_id:
        tell("the registry has another peer id for this node key: binding it anew (1 of 2 transactions)")
        await ledger.unbind_node(wallet, node.address)
        binding = None
    if binding is None:
        await _check_gas(ledger, wallet)
        receipt = await ledger.bind_node(wallet, node, identity.peer.peer_id)
        tell(f"bound node key {node.address} to wallet {wallet.address}")
        return max(since, receipt.block_number)
    return max(since, binding.bound_block)


async def _stake_missing(
    ledger: Registry, wallet: Signer, nodes: int, wanted: int | None, tell: Callable[[str], None]
) -> int:
    """Stake if the active stake does not cover `nodes`; the block of it, 0 if nothing was sent."""
    active, needed = (await ledger.account(wallet.address)).active, nodes * await ledger.min_stake()
    missing = needed - active
    if missing <= 0:
        return 0
    amount = missing if wanted is None else wanted
    if amount < missing:
        raise UsageError(
            f"--stake: {show_tokens(amount)} tokens are too few: the stake is {show_tokens(active)}, "
            f"{nodes} node(s) need {show_tokens(needed)}",
        )
    held = await ledger.token_balance(wallet.address)
    if held < amount:
        raise WalletError(
            f"wallet {wallet.address} holds {show_tokens(held)} tokens; {show_tokens(amount)} are needed"
        )
    await _check_gas(ledger, wallet)
    tell(f"staking {show_tokens(amount)} tokens of wallet {wallet.address}")
    receipt = await ledger.stake(wallet, amount)
    tell(f"staked: transaction 0x{receipt.transaction_hash.hex()} in block {receipt.block_number}")
    return receipt.block_number


async def _check_gas(ledger: Registry, wallet: Signer) -> None:
    if await ledger.balance(wallet.address) == 0:
        raise WalletError(f"wallet {wallet.address} has no coins to pay for transactions")


def is_running(data_dir: Path) -> bool:
    """Whether a node runs in `data_dir` now."""
    if not (data_dir / LOCK_FILE).exists():
        return False
    try:
        held = try_lock(data_dir / LOCK_FILE)
    except OSError:
        return False
    if held is None:
        return True
    held.release()
    return False

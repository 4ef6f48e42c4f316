"""`whoami`: who this node is, here and on the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from intellect_protocol.errors import IntellectError
from intellect_protocol.keys import PeerKey, load_or_create_node_key, peer_id_text

from .chain import open_ledger
from .config import NodeConfig, show_tokens
from .status import read_status
from .wallet_cli import keystore_address

if TYPE_CHECKING:
    from intellect_protocol.run import RunConfig


def local_identity(settings: NodeConfig, data_dir: Path) -> tuple[str | None, str | None, str | None]:
    """Addresses of wallet and node key, and peer id, as far as they exist here; nothing is created.

    Raises:
        WalletError: a key file is damaged.
    """
    status = read_status(data_dir)
    wallet = node = peer = None
    if settings.wallet is not None:
        wallet = keystore_address(settings.wallet)
    elif status is not None and status.wallet:
        wallet = status.wallet
    if (data_dir / "node.key").exists():
        node = load_or_create_node_key(data_dir / "node.key")[0].address
    if (data_dir / "peer.key").exists():
        peer = peer_id_text(PeerKey.load_or_create(data_dir / "peer.key").peer_id)
    return wallet, node, peer


async def who_am_i(settings: NodeConfig, run: RunConfig, data_dir: Path) -> dict[str, Any]:
    """What `whoami` shows. A chain that does not answer is said so; the rest is still shown.

    Raises:
        WalletError: a key file is damaged.
    """
    wallet, node, peer = local_identity(settings, data_dir)
    status = read_status(data_dir)
    credited = None if status is None else status.last_credited_version
    shown: dict[str, Any] = {
        "run": f"{run.terms.name} ({run.run_id.hex()[:16]})",
        "wallet": wallet or "unknown: give --wallet FILE",
        "node key": node or "none yet: join makes one",
        "peer id": peer or "none yet: join makes one",
        "last credited version": "none yet" if credited is None else str(credited),
        "data directory": str(data_dir),
    }
    ledger = open_ledger(run)
    try:
        if node is not None:
            binding = await ledger.node(node)
            shown["registration"] = (
                "not bound" if binding is None else f"bound to {binding.owner} in block {binding.bound_block}"
            )
        if wallet is not None:
            account = await ledger.account(wallet)
            shown["stake"] = (
                f"{show_tokens(account.active)} active, {show_tokens(account.unbonding)} unbonding, "
                f"{show_tokens(account.frozen)} frozen"
            )
            shown["tokens"] = f"{show_tokens(await ledger.token_balance(wallet))} not staked"
            if await ledger.is_barred(wallet):
                shown["barred"] = "yes: a fraud was upheld"
    except IntellectError as error:
        shown["ledger"] = f"not read: {error}"
    finally:
        ledger.close()
    return shown

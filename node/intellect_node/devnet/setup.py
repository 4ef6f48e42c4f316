"""Making a devnet: chain, keys, first policy, contracts, run configuration, funded wallets.

Each step leaves a file behind and is skipped when the file is there, so that a set-up which was
interrupted goes on where it stopped. All work is done by the real programs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import trio

from intellect_protocol.errors import IntellectError, PreflightError
from intellect_protocol.keys import (
    LocalSigner,
    PeerKey,
    load_keystore,
    peer_id_text,
    write_keystore,
    write_secret,
)

from .layout import DevnetPlan, Layout, node_names, validator_names
from .processes import Program, last_line, run_once

DEPLOYER = 0  # development account that deploys the contracts and funds everybody
STAKE_TOKENS = 1_000
_FUND_TOKENS = 5_000
_FUND_WEI = 10 * 10**18
_MODEL_TIMEOUT_S = 300.0
_LISTEN_TIMEOUT_S = 60.0
_INIT_TIMEOUT_S = 120.0


def coordinator_address(layout: Layout, plan: DevnetPlan) -> str:
    """The one address that peers know: the coordinator's full multiaddress."""
    peer = PeerKey.load_or_create(layout.coordinator_dir / "peer.key")
    return f"/ip4/127.0.0.1/tcp/{plan.ports['coordinator']}/p2p/{peer_id_text(peer.peer_id)}"


def chain_program(layout: Layout, plan: DevnetPlan) -> Program:
    """The development chain."""
    return Program(
        "chain",
        [
            "-m",
            "intellect_coordinator",
            "devchain",
            "--data-dir",
            str(layout.chain_dir),
            "--port",
            str(plan.ports["chain"]),
        ],
        layout.log("chain"),
    )


async def prepare(layout: Layout, plan: DevnetPlan, tell: Callable[[str], None]) -> None:
    """Everything that must exist before the roles start. The chain must be running.

    Raises:
        PreflightError: a step failed; the text says which and why.
    """
    if layout.ready_marker.exists():
        return
    _make_keys(layout, plan)
    await wait_for_port(layout, plan, "chain")
    if not (layout.policy_zero / "config.json").exists():
        tell(f"making the first policy ({plan.model})")
        await trio.to_thread.run_sync(_make_policy, layout, plan)
    if not layout.run_file.exists():
        tell("deploying the contracts")
        await trio.to_thread.run_sync(_init_run, layout, plan)
    tell("funding the wallets")
    await _fund(layout, plan)
    layout.ready_marker.touch()


def _make_keys(layout: Layout, plan: DevnetPlan) -> None:
    for name in ("coordinator", "publisher", *validator_names()):
        if not layout.key(name).exists():
            write_secret(layout.key(name), LocalSigner.create().secret())
    if not layout.password_file.exists():
        write_secret(layout.password_file, secrets.token_hex(16).encode() + b"\n")
    password = layout.password_file.read_text().strip()
    for path in wallet_files(layout, plan).values():
        if not path.exists():
            write_keystore(path, LocalSigner.create(), password, light=True)


def wallet_files(layout: Layout, plan: DevnetPlan) -> dict[str, Path]:
    """Keystores by name: one per node, and one for a person to join with."""
    return {**{name: layout.wallet(name) for name, _ in node_names(plan)}, "test": layout.test_wallet}


def wallet_addresses(layout: Layout, plan: DevnetPlan) -> dict[str, str]:
    """Wallet address by name, in lower case."""
    password = layout.password_file.read_text().strip()
    return {name: load_keystore(path, password).address for name, path in wallet_files(layout, plan).items()}


async def wait_for_port(layout: Layout, plan: DevnetPlan, name: str) -> None:
    """Wait until a role listens.

    Raises:
        PreflightError: it does not within a minute.
    """
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        try:
            with trio.fail_after(2):
                stream = await trio.open_tcp_stream("127.0.0.1", plan.ports[name])
                await stream.aclose()
            return
        except (OSError, trio.TooSlowError):
            if time.monotonic() > deadline:
                raise PreflightError(f"{name} did not start: {last_line(layout.log(name))}") from None
            await trio.sleep(0.1)


def _make_policy(layout: Layout, plan: DevnetPlan) -> None:
    run_once(
        Program(
            "init-model",
            [
                "-m",
                "intellect_trainer",
                "init-model",
                "--model",
                plan.model,
                "--environment",
                plan.task,
                "--seed",
                str(plan.seed),
                "--out",
                str(layout.policy_zero),
            ],
            layout.log("init-model"),
        ),
        timeout_s=_MODEL_TIMEOUT_S,
    )


def _init_run(layout: Layout, plan: DevnetPlan) -> None:
    arguments = [
        "-m",
        "intellect_coordinator",
        "init",
        "--name",
        f"devnet-{plan.model if '/' not in plan.model else 'local'}",
        "--out",
        str(layout.root),
        "--rpc",
        layout.rpc_url(plan),
        "--key",
        str(layout.key("coordinator")),
        "--publisher-key",
        str(layout.key("publisher")),
        "--checkpoint",
        str(layout.policy_zero),
        "--environment",
        plan.task,
        "--preset",
        plan.recipe,
        "--bootstrap",
        coordinator_address(layout, plan),
        "--development",
    ]
    for name in validator_names():
        arguments += ["--validator", LocalSigner(layout.key(name).read_bytes()).address]
    run_once(Program("init", arguments, layout.log("init")), timeout_s=_INIT_TIMEOUT_S)


async def _fund(layout: Layout, plan: DevnetPlan) -> None:
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.ledger.deployment import TOKEN_UNIT, Deployment
    from intellect_protocol.ledger.devkeys import development_signer

    deployer = development_signer(DEPLOYER)
    ledger = Ledger([layout.rpc_url(plan)], Deployment.load(layout.deployment_file), layout.root / "funding")
    try:
        recipients = dict(wallet_addresses(layout, plan))
        for name in ("coordinator", "publisher", *validator_names()):
            recipients[name] = LocalSigner(layout.key(name).read_bytes()).address
        for name, address in recipients.items():
            if await ledger.balance(address) == 0:
                await ledger.transfer_eth(deployer, address, _FUND_WEI, intent=f"fund/{name}")
            if await ledger.token_balance(address) == 0:
                await ledger.mint_token(deployer, address, _FUND_TOKENS * TOKEN_UNIT, intent=f"mint/{name}")
    except IntellectError as error:
        raise PreflightError(f"funding the wallets failed: {error}") from error
    finally:
        ledger.close()


async def stakes(layout: Layout, plan: DevnetPlan) -> dict[str, float]:
    """Tokens staked by each node's wallet (active and frozen), by name."""
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.ledger.deployment import TOKEN_UNIT, Deployment

    ledger = Ledger([layout.rpc_url(plan)], Deployment.load(layout.deployment_file))
    try:
        return {
            name: (await ledger.account(address)).total / TOKEN_UNIT
            for name, address in wallet_addresses(layout, plan).items()
            if name != "test"
        }
    finally:
        ledger.close()

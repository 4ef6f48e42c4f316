"""What on this machine and account keeps a node from working, each with a remedy.

`cheap_checks` need no network and run at every `join`; `doctor` adds the device, the chain, the
coordinator and the account. A check that cannot be made is itself a finding, never a traceback.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from intellect_protocol.errors import (
    ConfigError,
    IntellectError,
    PreflightError,
    UnreachableError,
    UpgradeRequiredError,
)

from .chain import open_ledger
from .config import NodeConfig, show_tokens

if TYPE_CHECKING:
    from intellect_protocol.ledger.client import Ledger
    from intellect_protocol.run import ModelTerms, RunConfig

_MIN_PYTHON = (3, 11)
_MIN_FREE_BYTES = 256 << 20
_MAX_SKEW_S = 120.0
_WARN_SKEW_S = 30.0
_LOOK_S = 10.0
_DEVICE_TIMEOUT_S = 60.0


class Severity(StrEnum):
    """How bad a finding is; only an error keeps a node from working."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    severity: Severity
    text: str
    remedy: str = ""
    kind: type[IntellectError] = PreflightError

    def error(self) -> IntellectError:
        """The finding as the error that ends a program."""
        return self.kind(f"{self.text}; {self.remedy}" if self.remedy else self.text)


def cheap_checks(settings: NodeConfig, run: RunConfig, data_dir: Path) -> list[Finding]:
    """What can be looked at quickly and without a network; an accelerator asked for takes seconds."""
    findings = [
        _check_python(sys.version_info[:3]),
        _check_protocol(run),
        _check_memory(run.terms.model),
        _check_disk(data_dir, run.terms.model, settings.retain_versions),
        _check_engine(settings.engine),
        *_check_listen(settings),
    ]
    if settings.device not in ("auto", "cpu"):
        findings.append(_check_device(settings.device))
    return findings


def _check_engine(engine: str) -> Finding:
    from importlib.util import find_spec

    if engine == "vllm" and find_spec("vllm") is None:
        remedy = "pip install 'intellect-node[vllm]', or use --engine torch"
        return Finding("engine", Severity.ERROR, "the vllm engine is not installed", remedy)
    return Finding("engine", Severity.OK, f"{engine} engine")


def _check_python(version: tuple[int, int, int]) -> Finding:
    text = "Python " + ".".join(map(str, version))
    if version[:2] < _MIN_PYTHON:
        return Finding("python", Severity.ERROR, f"{text} is too old", "install Python 3.11 or newer")
    return Finding("python", Severity.OK, text)


def _check_protocol(run: RunConfig) -> Finding:
    from intellect_protocol import __version__
    from intellect_protocol.run import PROTOCOL_VERSION

    ours = f"intellect-node {__version__} speaks protocol {PROTOCOL_VERSION}"
    if run.terms.protocol > PROTOCOL_VERSION:
        text = f"{ours}, the run needs {run.terms.protocol}"
        return Finding("version", Severity.ERROR, text, "upgrade intellect-node", UpgradeRequiredError)
    return Finding("version", Severity.OK, ours)


def estimated_bytes(model: ModelTerms) -> int:
    """A lower bound of the weights' size: the embedding alone, which the run's terms determine."""
    return model.vocab_size * model.hidden_size * (4 if model.dtype == "float32" else 2)


def _check_memory(model: ModelTerms) -> Finding:
    import psutil

    free, needed = psutil.virtual_memory().available, 2 * estimated_bytes(model)
    text = f"{_size(free)} of memory free, the model needs more than {_size(needed)}"
    if free < needed:
        return Finding("memory", Severity.ERROR, text, "close other programs, or use a larger machine")
    return Finding("memory", Severity.OK, text)


def _check_disk(data_dir: Path, model: ModelTerms, retain_versions: int) -> Finding:
    folder = data_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = _MIN_FREE_BYTES + estimated_bytes(model) * (retain_versions + 2)
    text = f"{_size(free)} free in {data_dir}, {_size(needed)} are needed for {retain_versions} versions"
    if free < needed:
        remedy = "free some space, choose another --data-dir, or lower retain_versions"
        return Finding("disk", Severity.ERROR, text, remedy)
    return Finding("disk", Severity.OK, text)


def _check_listen(settings: NodeConfig) -> Iterator[Finding]:
    from multiaddr import Multiaddr
    from multiaddr.exceptions import MultiaddrError

    for address in settings.listen:
        try:
            names = [protocol.name for protocol in Multiaddr(address).protocols()]
        except (MultiaddrError, ValueError):
            names = []
        if len(names) != 2 or names[0] not in ("ip4", "ip6") or names[1] != "tcp":
            remedy = "write it as /ip4/0.0.0.0/tcp/4001"
            yield Finding(
                "listen", Severity.ERROR, f"not an address to listen on: {address!r}", remedy, ConfigError
            )


async def doctor(
    settings: NodeConfig, run: RunConfig, data_dir: Path, wallet: str | None, node: str | None
) -> list[Finding]:
    """All checks.

    Args:
        wallet, node: addresses, where they are known.
    """
    findings = await trio.to_thread.run_sync(cheap_checks, settings, run, data_dir)
    if settings.device in ("auto", "cpu"):
        findings.append(await trio.to_thread.run_sync(_check_device, settings.device))
    findings += await trio.to_thread.run_sync(_check_ports, settings)
    findings += await _check_chain(run, wallet, node)
    findings.append(await _check_coordinator(run))
    return findings


def _check_device(device: str) -> Finding:
    """In a process of its own: torch takes seconds to import and may die of a broken driver."""
    import subprocess

    script = (
        "import sys, torch; from intellect_protocol.engines.torch_engine import choose_device;"
        "print(torch.__version__, choose_device(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        text = f"torch does not answer within {_DEVICE_TIMEOUT_S:.0f} s"
        return Finding("device", Severity.ERROR, text, "look at the driver, or use --device cpu")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        text = last.rpartition("Error: ")[2][:300]
        return Finding("device", Severity.ERROR, f"torch: {text}", "reinstall torch, or use --device cpu")
    version, _, name = done.stdout.strip().partition(" ")
    return Finding("device", Severity.OK, f"torch {version} on {name}")


def _check_ports(settings: NodeConfig) -> list[Finding]:
    import socket

    from multiaddr import Multiaddr

    findings = []
    for address in settings.listen:
        try:
            parsed = Multiaddr(address)
            family = socket.AF_INET6 if "ip6" in address else socket.AF_INET
            host = parsed.value_for_protocol("ip6" if family == socket.AF_INET6 else "ip4")
            port = int(parsed.value_for_protocol("tcp"))
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            findings.append(Finding("ports", Severity.OK, f"{address} is free"))
        except Exception as error:
            # multiaddr raises many kinds; a running node holds its own port, hence only a warning.
            text = f"{address} cannot be listened on: {error}"
            findings.append(
                Finding("ports", Severity.WARNING, text, "stop what holds the port, or use --listen")
            )
    return findings


async def _check_chain(run: RunConfig, wallet: str | None, node: str | None) -> list[Finding]:
    try:
        ledger = open_ledger(run)
    except ConfigError as error:
        return [Finding("chain", Severity.ERROR, str(error), "use the run configuration of this run")]
    try:
        await ledger.check()
        findings = [
            Finding(
                "chain", Severity.OK, f"chain {run.terms.ledger.chain_id} answers with the run's contracts"
            )
        ]
        findings += await _check_account(ledger, wallet, node)
        return findings
    except UnreachableError as error:
        remedy = "check the network; another RPC can be named in the run configuration"
        return [Finding("chain", Severity.ERROR, str(error), remedy, UnreachableError)]
    except IntellectError as error:
        return [Finding("chain", Severity.ERROR, str(error), "use the run configuration of this chain")]
    finally:
        ledger.close()


async def _check_account(ledger: Ledger, wallet: str | None, node: str | None) -> list[Finding]:
    findings: list[Finding] = []
    if wallet is not None:
        account, needed = await ledger.account(wallet), await ledger.min_stake()
        tokens = await ledger.token_balance(wallet)
        text = (
            f"wallet {wallet}: stake {show_tokens(account.active)}, {show_tokens(tokens)} tokens not staked"
        )
        enough = account.active >= needed or tokens >= needed
        remedy = (
            "" if enough else f"get {show_tokens(needed - account.active)} tokens: a node needs this stake"
        )
        findings.append(Finding("balance", Severity.OK if enough else Severity.ERROR, text, remedy))
        if await ledger.balance(wallet) == 0:
            text = f"wallet {wallet} has no coins to pay for transactions"
            findings.append(Finding("balance", Severity.WARNING, text, "send some to it"))
        if await ledger.is_barred(wallet):
            text = f"wallet {wallet} is barred: a fraud was upheld"
            findings.append(Finding("registration", Severity.ERROR, text, "join with another wallet"))
    if node is not None:
        binding = await ledger.node(node)
        if binding is None:
            remedy = "join binds it"
            findings.append(
                Finding("registration", Severity.WARNING, f"node key {node} is not bound", remedy)
            )
        else:
            text = f"node key {node} is bound to {binding.owner}"
            right = wallet is None or wallet == binding.owner
            remedy = "" if right else "join with that wallet, or use another --data-dir"
            findings.append(Finding("registration", Severity.OK if right else Severity.ERROR, text, remedy))
    return findings


async def _check_coordinator(run: RunConfig) -> Finding:
    """Whether a known peer answers, and how far its clock is from ours."""
    from .ask import ask_clock

    skews, problems = [], []
    for address in run.revision.bootstrap:
        try:
            with trio.fail_after(_LOOK_S):
                before = time.time()
                clock_s = await ask_clock(address)
                skews.append((before + time.time()) / 2 - clock_s)
        except (IntellectError, trio.TooSlowError) as error:
            problems.append(f"{address}: {error or 'no answer'}")
    if not skews:
        text = f"no known peer answers: {'; '.join(problems)}"
        remedy = "check the network and the firewall; the run may be down"
        return Finding("peers", Severity.ERROR, text, remedy, UnreachableError)
    skew_s = min(skews, key=abs)
    text = (
        f"{len(skews)} of {len(run.revision.bootstrap)} known peers answer, clock {skew_s:+.1f} s from theirs"
    )
    if not math.isfinite(skew_s) or abs(skew_s) > _MAX_SKEW_S:
        return Finding("clock", Severity.ERROR, text, "set the clock (NTP): requests would be refused")
    if abs(skew_s) > _WARN_SKEW_S:
        return Finding("clock", Severity.WARNING, text, "set the clock (NTP)")
    return Finding("clock", Severity.OK, text)


async def examine(settings: NodeConfig, as_json: bool, report: bool) -> int:
    """Run `doctor` and print its findings; the exit code of the worst.

    Raises:
        ConfigError, UnreachableError: there is no run configuration to examine against.
    """
    from .config import data_dir_for
    from .prepare import obtain_run
    from .redaction import redact
    from .whoami import local_identity

    run = await obtain_run(settings, lambda text: None)
    data_dir = data_dir_for(settings, run)
    wallet, node, _ = local_identity(settings, data_dir)
    findings = await doctor(settings, run, data_dir, wallet, node)
    if as_json:
        import msgspec

        records = [
            {"check": f.check, "severity": f.severity, "text": f.text, "remedy": f.remedy} for f in findings
        ]
        text = msgspec.json.format(msgspec.json.encode(records), indent=2).decode()
    else:
        marks = {Severity.OK: "ok     ", Severity.WARNING: "warning", Severity.ERROR: "ERROR  "}
        text = "\n".join(
            f"{marks[f.severity]} {f.check:<12} {f.text}" + (f"\n{'':21}-> {f.remedy}" if f.remedy else "")
            for f in findings
        )
    print(redact(text, run) if report else text)
    errors = [f for f in findings if f.severity is Severity.ERROR]
    return max((f.kind.exit_code for f in errors), default=0)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"

"""`intellect-node verify FILE`: find what the checks need to know about a rollout file, and run them.

    unit and checkpoint   the file's metadata
    block hash            the ledger, or --block-hash without a chain
    node key, signature   the data directory, where there is one; else the file's node, and no signature
    weights               --weights, else the data directory, else the swarm if --fetch allows it

Weights are compared with the signed manifest of the version wherever one is at hand: in the data directory,
or beside the folder as `<folder>.manifest`, where a trainer puts it.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
import typer

from intellect_protocol.checkpoint import (
    ManifestLimits,
    SignedManifest,
    checkpoint_hash,
    verify_folder,
    verify_manifest,
)
from intellect_protocol.engines.base import EngineInfo, RowScore, Sampling, ScoreRow
from intellect_protocol.errors import (
    EXIT_OK,
    EXIT_REFUSED,
    ManifestError,
    RefusedError,
    RolloutFileError,
    UsageError,
)
from intellect_protocol.keys import LocalSigner, PeerKey, load_or_create_node_key
from intellect_protocol.rollouts import FileLimits, UnitMeta, read_unit
from intellect_protocol.validation.findings import Check, Finding, Kind, Outcome
from intellect_protocol.wire import decode, sha256

from .chain import open_ledger
from .own_checks import NOT_RUN, OwnReport, check_own, own_context, refused_file
from .work_cli import REMEDIES

if TYPE_CHECKING:
    from intellect_protocol.engines.supervisor import EngineOptions
    from intellect_protocol.run import RunConfig

_MAX_MANIFEST_BYTES = 64 << 20
_MANIFEST_LIMITS = ManifestLimits(max_checkpoint_bytes=1 << 46)


class VerifyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to verify and with what."""

    file: Path
    run: RunConfig
    data_dir: Path  # need not exist
    engine: EngineOptions
    weights: Path | None = None
    fetch: bool = False
    block_hash: bytes | None = None


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    file: str
    version: int | None = None  # None: the file could not be read
    index: int | None = None
    node: str = ""
    weights: str = ""
    engine: EngineInfo | None = None
    report: OwnReport

    @property
    def exit_code(self) -> int:
        """0 only where a validator would accept the unit at once."""
        return EXIT_OK if self.report.outcome == Outcome.ACCEPTED else EXIT_REFUSED


async def verify_file(options: VerifyOptions) -> Verified:
    """Judge a file as a validator would.

    Raises:
        UsageError: the file, the weights or the node key are not there.
        UnreachableError: the chain or the swarm do not answer.
        ManifestError: the weights are not those of the file's checkpoint.
        RefusedError: the ledger has no such version.
        EngineError: the engine failed.
    """
    run = options.run
    data = await trio.to_thread.run_sync(_read, options.file, run.revision.window.max_submission_bytes)
    try:
        meta = (await trio.to_thread.run_sync(read_unit, data, _limits(run))).meta
    except RolloutFileError as error:
        finding = Finding(Check.FILE, "file_format", Kind.INVALID, str(error))
        return Verified(file=str(options.file), report=refused_file(finding))
    if meta.run_id != run.run_id:
        finding = Finding(Check.FILE, "file_meta", Kind.INVALID, "the file is for another run")
        return Verified(file=str(options.file), report=refused_file(finding))
    node, signature = await trio.to_thread.run_sync(_own, options, meta, sha256(data))
    checkpoint, block = await _recorded(options, meta)

    from intellect_protocol.environments.tasks import load_tasks

    async with AsyncExitStack() as stack, _weights(options, meta.version, checkpoint) as (folder, origin):
        tasks = await trio.to_thread.run_sync(load_tasks, run.terms, folder)
        context = own_context(run, tasks, node, meta.version, checkpoint, block, meta.index, data, signature)
        scorer = _EngineOnDemand(stack, options.engine, folder)
        report = await check_own(data, context, scorer)
    return Verified(
        file=str(options.file),
        version=meta.version,
        index=meta.index,
        node=f"0x{node.hex()}",
        weights=origin,
        engine=scorer.info,
        report=report,
    )


class _EngineOnDemand:
    """A scorer whose engine is started when a unit comes as far as to need it."""

    def __init__(self, stack: AsyncExitStack, options: EngineOptions, folder: Path) -> None:
        self._stack, self._options, self._folder = stack, options, folder
        self.info: EngineInfo | None = None

    async def score(self, rows: Sequence[ScoreRow], sampling: Sampling, secret: bytes) -> list[RowScore]:
        from intellect_protocol.engines.supervisor import open_engine

        client = await self._stack.enter_async_context(open_engine(self._options))
        self.info = await client.load(self._folder)
        return await client.score(rows, sampling, secret=secret)


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def _limits(run: RunConfig) -> FileLimits:
    """As a validator's (`UnitContext.file_limits`)."""
    terms = run.terms
    return FileLimits(
        max_rows=terms.sampling.prompts_per_unit * terms.sampling.samples_per_prompt,
        max_prompt_tokens=terms.model.max_positions,
        max_completion_tokens=terms.model.max_positions,
        max_file_bytes=run.revision.window.max_submission_bytes,
    )


def _node_key(data_dir: Path) -> LocalSigner | None:
    path = data_dir / "node.key"
    return load_or_create_node_key(path)[0] if path.exists() else None


def _own(options: VerifyOptions, meta: UnitMeta, file_hash: bytes) -> tuple[bytes, bytes]:
    """The node's 20 address bytes, and its signature over this file if it is in the signed history."""
    key = _node_key(options.data_dir)
    if key is None:
        return meta.node, b""
    if not (options.data_dir / "history.db").exists():
        return key.address_bytes, b""
    from .history import History

    history = History(options.data_dir, options.run.run_id, key.address)
    try:
        entry = history.entry(meta.version, meta.index)
    finally:
        history.close()
    signed = entry is not None and entry.file_hash == file_hash
    return key.address_bytes, entry.signature if entry is not None and signed else b""


async def _recorded(options: VerifyOptions, meta: UnitMeta) -> tuple[bytes, bytes]:
    """C and B of the version."""
    if options.block_hash is not None:
        return meta.checkpoint_hash, options.block_hash
    ledger = open_ledger(options.run)
    try:
        recorded = await ledger.checkpoint(options.run.run_id, meta.version)
    finally:
        ledger.close()
    if recorded is None:
        raise RefusedError("unknown_version", f"version {meta.version} is not recorded on the ledger")
    return recorded.checkpoint_hash, recorded.block_hash


@asynccontextmanager
async def _weights(
    options: VerifyOptions, version: int, checkpoint: bytes
) -> AsyncIterator[tuple[Path, str]]:
    """A folder with the version's weights, and where they come from."""
    own = options.data_dir / "policies" / f"v{version:08d}"
    folder = options.weights or (own if own.is_dir() else None)
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
        compared = await trio.to_thread.run_sync(_compare, options, folder, checkpoint)
        yield folder, f"{folder} ({compared})"
        return
    if not options.fetch:
        raise UsageError(
            f"no weights of version {version} in {options.data_dir}: name them with --weights DIR, or allow "
            "--fetch from the swarm"
        )
    key = _node_key(options.data_dir)
    if key is None:
        raise UsageError(
            f"{options.data_dir}: no node key to fetch weights with; name them with --weights DIR"
        )
    from intellect_protocol.network.swarm import SwarmOptions, open_swarm

    with tempfile.TemporaryDirectory(prefix="intellect-verify-") as scratch:
        # Apart from the data directory: a daemon may be at work there.
        swarm_options = SwarmOptions(
            role="client",
            data_dir=Path(scratch),
            config=options.run,
            peer_key=PeerKey.load_or_create(Path(scratch) / "peer.key"),
            signer=key,
            weights=True,
        )
        async with open_swarm(swarm_options) as swarm:
            assert swarm.policies is not None
            yield await swarm.policies.obtain(version), "fetched from the swarm"


def _compare(options: VerifyOptions, folder: Path, checkpoint: bytes) -> str:
    """Hold a folder against the manifest of C, if there is one here."""
    places = [
        options.data_dir / "chunks" / "manifests" / checkpoint.hex(),
        folder.with_name(f"{folder.name}.manifest"),
    ]
    terms = options.run.terms
    for place in places:
        if not place.is_file():
            continue
        with place.open("rb") as file:
            signed = decode(file.read(_MAX_MANIFEST_BYTES), SignedManifest)
        if checkpoint_hash(signed.manifest) != checkpoint:
            raise ManifestError(f"{place}: the manifest of another checkpoint than the file's")
        manifest = verify_manifest(signed, options.run.run_id, terms.keys.publisher, _MANIFEST_LIMITS)
        verify_folder(folder, manifest)
        return "as its manifest says"
    return "not compared with a manifest, there is none here"


def shown(verified: Verified) -> Iterator[str]:
    """The answer in lines for a terminal."""
    report = verified.report
    if verified.version is None:
        yield f"{verified.file}"
    else:
        yield f"unit {verified.version}/{verified.index} of node {verified.node}: {report.tokens:,} tokens"
        yield f"weights {verified.weights}"
    engine = verified.engine
    if engine is not None:
        yield f"engine {engine.engine} {engine.attention} {engine.dtype} on {engine.device}"
    for line in report.checks:
        yield f"{line.check:<12} {line.result:<10} {line.text}".rstrip()
        for each in line.measured:
            row = "" if each.row is None else f" (row {each.row})"
            fraud = "" if each.fraud is None else f", fraud above {each.fraud:.4g}"
            yield f"{'':<24}{each.what}: {each.measured:.4g}{row}; suspect above {each.suspect:.4g}{fraud}"
        for note in line.findings:
            yield f"{'':<13}{note.kind}: {note.code}: {note.text}"
        if line.findings:
            yield f"{'':<13}what to do: {REMEDIES.get(line.check, 'see the documentation of this check')}"
    left_out = sum(line.result == NOT_RUN for line in report.checks)
    yield {
        Outcome.ACCEPTED.value: "a validator would accept this unit",
        Outcome.SUSPECT.value: "a second validator would have to look at this unit; it is near a limit",
        Outcome.REJECTED.value: f"a validator would refuse this unit ({left_out} checks were not run)",
    }[report.outcome]


def parse_block_hash(text: str) -> bytes:
    """
    Raises:
        UsageError: not 32 bytes in hex.
    """
    try:
        block = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        block = b""
    if len(block) != 32:
        raise UsageError(f"not a block hash: {text[:80]!r}; 64 hex digits are expected")
    return block


def print_verified(verified: Verified) -> None:
    """Lines on stdout."""
    for line in shown(verified):
        typer.echo(line)

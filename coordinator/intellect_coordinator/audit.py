"""`intellect-coordinator audit`: judge an evidence bundle again, on any machine, and compare the verdicts.

Needs the bundle and the weights of its version; no coordinator. The weights come from a folder, or from
the swarm for whoever holds a validator's or a bound node's key (peers serve weights to nobody else). They are
checked against the signed manifest in the bundle, so whoever they come from cannot sway the result.

Another machine rounds differently, and so do another batch size, attention kernel, dtype or number of
threads: measured values move a little, and a finding close to its limit may come or go. A verdict is
therefore the same if its outcome is, and if it rests on the same check with at least one reason in common.

What a bundle cannot show is that its run is *the* run: its configuration is signed by the key that it names
itself. Whoever has the run's own run.toml compares the two (`same_run`).
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from intellect_protocol.checkpoint import verify_folder
from intellect_protocol.engines.base import EngineInfo
from intellect_protocol.errors import ConfigError, IntellectError, InvalidDataError, UsageError
from intellect_protocol.keys import LocalSigner, PeerKey
from intellect_protocol.messages import FindingNote
from intellect_protocol.validation.findings import Outcome, to_notes

from .evidence import MAX_EVIDENCE_BYTES, CheckedEvidence, read_evidence
from .judging import Judge
from .reviews import claims_of

if TYPE_CHECKING:
    from intellect_protocol.engines.supervisor import EngineOptions
    from intellect_protocol.run import RunConfig
    from intellect_protocol.validation.pipeline import Judgement


class AuditReport(msgspec.Struct, frozen=True):
    """What the audit found beside what the validator had said."""

    run: str
    run_id: str
    evidence_hash: str
    node: str
    version: int
    index: int
    outcome: str
    findings: list[FindingNote]
    said_outcome: str
    said_findings: list[FindingNote]
    engine: EngineInfo | None  # None: the unit was refused by a check that needs no model

    @property
    def same(self) -> bool:
        """Whether both verdicts are of one outcome, of one check, and share a reason."""
        own, said = reasons(self.findings), reasons(self.said_findings)
        checks = {check for check, _ in own} == {check for check, _ in said}
        return self.outcome == self.said_outcome and checks and (own == said or bool(own & said))


def reasons(notes: list[FindingNote]) -> set[tuple[str, str]]:
    """(check, code) of the findings that decide; notes and near misses may differ between machines."""
    return {(note.check, note.code) for note in notes if note.kind in ("fraud", "invalid", "stale")}


def same_run(checked: CheckedEvidence, run: RunConfig) -> None:
    """Compare a bundle with the run that it is said to be of.

    Raises:
        InvalidDataError: another run, or limits that the run's coordinator did not sign into this revision.
    """
    theirs = checked.config
    if theirs.run_id != run.run_id:
        raise InvalidDataError(
            f"the evidence is of run {theirs.terms.name} ({theirs.run_id.hex()[:16]}), not of "
            f"{run.terms.name} ({run.run_id.hex()[:16]})"
        )
    if theirs.revision.number == run.revision.number and theirs.revision != run.revision:
        raise InvalidDataError(f"the evidence has another revision {run.revision.number} than the run")


def read_bundle(path: Path) -> CheckedEvidence:
    """
    Raises:
        ConfigError: the file cannot be read.
        InvalidDataError: it is not a bundle whose parts fit together.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_EVIDENCE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    return read_evidence(data)


class _Folder:
    """Weights of one version in a folder."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version

    async def obtain(self, version: int) -> Path:
        if version != self._version:
            raise InvalidDataError(f"the folder holds version {self._version}")
        return self._folder


async def audit(
    checked: CheckedEvidence,
    engine: EngineOptions,
    *,
    weights: Path | None = None,
    signer: LocalSigner | None = None,
    data_dir: Path | None = None,
) -> AuditReport:
    """Judge a bundle again.

    Args:
        weights: folder with the checkpoint; None fetches it from the swarm as `signer`.
        data_dir: where fetched weights go and the peer key is; None: a temporary directory.

    Raises:
        UsageError: neither a folder nor a key is given.
        ManifestError: the folder does not hold the checkpoint of the manifest.
        UnreachableError: the swarm does not answer or does not have the weights.
        IntellectError: the engine failed.
    """
    async with _weights(checked, weights, signer, data_dir) as folder:
        await trio.to_thread.run_sync(verify_folder, folder, checked.manifest)
        evidence = checked.evidence
        async with Judge(checked.config, _Folder(folder, evidence.version), engine) as judge:
            judgement = await judge.judge(evidence.file, claims_of(checked), checked.verdict.secret)
            info = judge.engine_info
    return compare(checked, judgement, info)


def compare(checked: CheckedEvidence, judgement: Judgement, engine: EngineInfo | None) -> AuditReport:
    """Put a judgement of a bundle's unit beside the validator's.

    Args:
        engine: what scored the unit; None if no model was needed.

    Raises:
        IntellectError: the judgement is inconclusive; the fault is this machine's.
    """
    if judgement.outcome is Outcome.INCONCLUSIVE:
        raise IntellectError(f"the audit failed on this machine: {judgement.fault}")
    evidence = checked.evidence
    return AuditReport(
        run=checked.config.terms.name,
        run_id=checked.config.run_id.hex(),
        evidence_hash=checked.evidence_hash.hex(),
        node=f"0x{evidence.node.hex()}",
        version=evidence.version,
        index=evidence.index,
        outcome=judgement.outcome.value,
        findings=to_notes(judgement.findings),
        said_outcome=checked.verdict.outcome,
        said_findings=checked.verdict.findings,
        engine=engine,
    )


@asynccontextmanager
async def _weights(
    checked: CheckedEvidence, folder: Path | None, signer: LocalSigner | None, data_dir: Path | None
) -> AsyncIterator[Path]:
    if folder is not None:
        yield folder
        return
    if signer is None:
        raise UsageError("name the weights: --weights DIR, or --key FILE to fetch them from the swarm")
    from intellect_protocol.network.swarm import SwarmOptions, open_swarm

    with tempfile.TemporaryDirectory(prefix="intellect-audit-") as scratch:
        folder = data_dir or Path(scratch)
        options = SwarmOptions(
            role="client",
            data_dir=folder,
            config=checked.config,
            peer_key=PeerKey.load_or_create(folder / "peer.key"),
            signer=signer,
            weights=True,
        )
        async with open_swarm(options) as swarm:
            assert swarm.policies is not None
            yield await swarm.policies.obtain(checked.evidence.version)

"""The work file: all judged work of some versions, published behind the root on the ledger.

Whoever holds the file can recompute the roots, and check every line of it: each leaf comes with the verdict
of the validator who judged it, whose signature covers unit and file through the job's id. So the coordinator
can neither invent an acceptance nor turn a verdict around; and what it leaves out, the holder of a receipt
can show. Reputation is computed from these files and the ledger's events alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from .errors import InvalidDataError, WalletError, WireError
from .keys import address_bytes, recover_address, verdict_digest
from .ledger.merkle import WorkLeaf, leaf_hash, merkle_root
from .ledger.records import WorkEntry
from .messages import JudgeVerdict
from .wire import decode_canonical, encode, sha256, short, u64

FORMAT = 1
MAX_WORK_FILE_BYTES = 64 << 20
MAX_VERSIONS = 64  # entries of one commitment (WorkLedger.MAX_ENTRIES)


class JudgedLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A leaf and the verdict behind it. `attempt` and the leaf's fields give the job's id."""

    leaf: WorkLeaf
    attempt: int
    verdict: bytes  # canonical msgpack of a JudgeVerdict
    signature: bytes  # its validator's, 65 bytes


class AbandonedUnit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A unit that its node closed without work; no leaf, but part of its record."""

    node: str
    index: int


class UnjudgedUnit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receipted submission that no validator could judge: neither credit nor blame, but not hidden."""

    node: str
    index: int
    work_hash: bytes


class AuditReveal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seed of a version's audit draws and the order of its receipts, so that anybody can draw again."""

    seed: bytes  # 32 bytes; see `validation.audit_share`
    received_at_ms: list[int]  # of the leaves in their order, then of the unjudged units in theirs


class VersionWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work of one version; all three lists ascend by (index, node) and share no unit."""

    version: int
    revision: int  # of the commitment: 0 for the first, one more after each void
    leaves: list[JudgedLeaf]
    abandoned: list[AbandonedUnit]
    unjudged: list[UnjudgedUnit]
    reveal: AuditReveal | msgspec.UnsetType = msgspec.UNSET  # left out where every unit is audited

    def names(self, node: str, index: int, work_hash: bytes) -> bool:
        """Whether the file answers for a receipted submission, by a leaf or as unjudged."""
        wanted = (node, index, work_hash)
        judged = ((each.leaf.node, each.leaf.index, each.leaf.work_hash) for each in self.leaves)
        unjudged = ((each.node, each.index, each.work_hash) for each in self.unjudged)
        return wanted in judged or wanted in unjudged


class WorkFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one commitment covers; its canonical msgpack is the file."""

    format: int
    run_id: bytes
    versions: list[VersionWork]


def judge_job_id(
    run_id: bytes, version: int, node: bytes, index: int, file_hash: bytes, attempt: int
) -> bytes:
    """Id of the `attempt`-th job of judging one file (32 bytes); a verdict signed under it names the file."""
    return sha256(
        b"intellect/judge-job/1", run_id, u64(version), short(node), u64(index), file_hash, u64(attempt)
    )


def work_entry(run_id: bytes, work: VersionWork, data_hash: bytes) -> WorkEntry:
    """What validators sign for one version of a work file with SHA-256 `data_hash`."""
    leaves = [judged.leaf for judged in work.leaves]
    accepted = [leaf for leaf in leaves if leaf.accepted]
    return WorkEntry(
        version=work.version,
        revision=work.revision,
        root=merkle_root([leaf_hash(run_id, leaf) for leaf in leaves]),
        data_hash=data_hash,
        accepted=len(accepted),
        rejected=len(leaves) - len(accepted),
        units=sum(leaf.units for leaf in accepted),
    )


def work_entries(file: WorkFile, data_hash: bytes) -> tuple[WorkEntry, ...]:
    """The entries of the commitment that a work file stands behind, in its order."""
    return tuple(work_entry(file.run_id, work, data_hash) for work in file.versions)


def write_work_file(run_id: bytes, versions: Sequence[VersionWork]) -> bytes:
    """Canonical bytes of a work file."""
    return encode(WorkFile(FORMAT, run_id, list(versions)))


def read_work_file(data: bytes, run_id: bytes, validators: Collection[str]) -> WorkFile:
    """Read an untrusted work file and check every leaf against its verdict.

    Args:
        validators: addresses whose verdicts count.

    Raises:
        InvalidDataError: malformed, another run, out of order, or a leaf without a valid verdict.
    """
    try:
        file = decode_canonical(data, WorkFile, max_bytes=MAX_WORK_FILE_BYTES)
        if file.format != FORMAT or file.run_id != run_id:
            raise InvalidDataError("the work file is of another format or run")
        versions = [work.version for work in file.versions]
        if not 0 < len(versions) <= MAX_VERSIONS or versions != sorted(set(versions)):
            raise InvalidDataError("the versions of the work file do not ascend, or are too many")
        for work in file.versions:
            _check_version(run_id, work, validators)
    except (WireError, WalletError, ValueError) as error:
        raise InvalidDataError(f"malformed work file: {error}") from error
    return file


def _check_version(run_id: bytes, work: VersionWork, validators: Collection[str]) -> None:
    if work.version < 0 or work.revision < 0:
        raise InvalidDataError("a version or revision is negative")
    lists = (
        [(judged.leaf.index, address_bytes(judged.leaf.node)) for judged in work.leaves],
        [(unit.index, address_bytes(unit.node)) for unit in work.abandoned],
        [(unit.index, address_bytes(unit.node)) for unit in work.unjudged],
    )
    if any(units != sorted(set(units)) for units in lists):
        raise InvalidDataError(f"the units of version {work.version} do not ascend by index and node")
    if len(set().union(*lists)) != sum(map(len, lists)):
        raise InvalidDataError(f"a unit of version {work.version} is named twice")
    if isinstance(work.reveal, AuditReveal):
        times = work.reveal.received_at_ms
        if len(times) != len(work.leaves) + len(work.unjudged) or min(times, default=0) < 0:
            raise InvalidDataError(f"not every receipt of version {work.version} has a time")
    for judged in work.leaves:
        if judged.leaf.version != work.version:
            raise InvalidDataError(f"a leaf of another version in version {work.version}")
        check_leaf(run_id, judged, validators)


def check_leaf(run_id: bytes, judged: JudgedLeaf, validators: Collection[str]) -> JudgeVerdict:
    """The verdict behind a leaf, once it is known to be a validator's and to say what the leaf says.

    Raises:
        InvalidDataError: it is not, or does not.
    """
    leaf = judged.leaf
    name = f"unit {leaf.version}/{leaf.index} of {leaf.node}"
    job_id = judge_job_id(
        run_id, leaf.version, address_bytes(leaf.node), leaf.index, leaf.work_hash, judged.attempt
    )
    signer = recover_address(verdict_digest(run_id, job_id, judged.verdict), judged.signature)
    if signer is None or signer not in validators:
        raise InvalidDataError(f"{name}: the verdict is not signed by a validator")
    verdict = decode_canonical(judged.verdict, JudgeVerdict)
    if leaf.accepted != (verdict.outcome == "accepted") or verdict.outcome == "inconclusive":
        raise InvalidDataError(f"{name}: the leaf does not say what the verdict says")
    if leaf.units != (verdict.rows if leaf.accepted else 0):
        raise InvalidDataError(f"{name}: the credit is not that of the verdict")
    return verdict

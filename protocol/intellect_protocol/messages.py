"""Every message between peers, one frozen struct each.

A request's name on the wire is its struct's name. Answers are `<Request>Result` unless they are a
thing with a name of its own (a `Receipt`, an `Announcement`). Files travel as the request's or
answer's body, never inside a struct.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .keys import announcement_digest, receipt_digest, recover_address
from .wire import encode, sha256


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, unknown fields refused."""


# --- identity and public data -------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First request on a connection, and its answer: who speaks, and in which run."""

    protocol: int
    run_id: bytes  # 32 bytes; empty: not known yet (a newcomer that will ask GetRun)
    agent: str  # e.g. "intellect-node/0.1.0"
    role: str  # "node" | "coordinator" | "validator" | "seeder" | "client"
    node: str = ""  # address of the key that signs this peer's requests
    binding: bytes = b""  # Ed25519 signature of the peer key over `keys.binding_digest`
    vouch: bytes = b""  # secp256k1 signature of that key over `keys.vouch_digest`


class GetRun(Message, frozen=True):
    """Ask for the run configuration."""


class GetRunResult(Message, frozen=True):
    config: bytes  # run.toml


class Announcement(Message, frozen=True):
    """A published version, signed by the run's publisher."""

    run_id: bytes
    version: int
    checkpoint_hash: bytes
    manifest_bytes: int
    signature: bytes

    def is_signed_by(self, publisher: str) -> bool:
        """Whether the run's publisher signed exactly this announcement."""
        digest = announcement_digest(self.run_id, self.version, self.checkpoint_hash, self.manifest_bytes)
        return recover_address(digest, self.signature) == publisher


class GetHead(Message, frozen=True):
    """Ask for the newest version the peer knows."""


class GetHeadResult(Message, frozen=True):
    announcement: Announcement | None
    clock_ms: int


class GetManifest(Message, frozen=True):
    checkpoint_hash: bytes


class GetManifestResult(Message, frozen=True):
    manifest: bytes
    signature: bytes


# --- work ----------------------------------------------------------------------------------------


class SubmissionState(StrEnum):
    """Where a submission stands; one enum for coordinator, node and documents."""

    RECEIVED = "received"
    QUEUED = "queued"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"


class TrainingState(StrEnum):
    """Whether an accepted unit was used; a second track beside `SubmissionState`."""

    NONE = "none"
    BATCHED = "batched"
    TRAINED = "trained"
    FILTERED = "filtered"
    EXPIRED = "expired"


class Precommit(Message, frozen=True):
    """Hold the deadline of a unit whose upload is under way."""

    version: int
    index: int
    file_hash: bytes  # SHA-256
    size_bytes: int


class PrecommitResult(Message, frozen=True):
    deadline_ms: int


class Submit(Message, frozen=True):
    """One unit of work; the body is the rollout file."""

    version: int
    checkpoint_hash: bytes
    index: int
    file_hash: bytes  # SHA-256 of the body
    size_bytes: int
    work_signature: bytes  # node key over `keys.work_digest`


class Receipt(Message, frozen=True):
    """The coordinator has the submission on disk."""

    run_id: bytes
    version: int
    index: int
    node: bytes  # 20 address bytes
    file_hash: bytes
    received_at_ms: int
    signature: bytes  # coordinator key over `keys.receipt_digest`

    def is_signed_by(self, coordinator: str) -> bool:
        """Whether the run's coordinator signed exactly this receipt."""
        digest = receipt_digest(
            self.run_id, self.version, self.index, self.node, self.file_hash, self.received_at_ms
        )
        return recover_address(digest, self.signature) == coordinator


class Abandon(Message, frozen=True):
    """Close one unit index without work, so that later indices may follow."""

    version: int
    index: int


class AbandonResult(Message, frozen=True):
    left: int  # how many more the node may abandon in this version


class FindingNote(Message, frozen=True):
    """One finding of a check, as told to the node."""

    check: str
    code: str
    kind: str  # "invalid" | "stale" | "fraud" | "suspect" | "note"
    row: int | None
    measured: float | None
    limit: float | None
    text: str


class WorkStatus(Message, frozen=True):
    """State of one unit, with the time (Unix ms) each state was reached."""

    version: int
    index: int
    file_hash: bytes
    state: SubmissionState
    training: TrainingState
    times_ms: dict[str, int]
    findings: list[FindingNote]
    case_id: int | None = None


class GetVerdicts(Message, frozen=True):
    """Ask for the caller's units that changed after `cursor`."""

    cursor: int
    limit: int = 100


class GetVerdictsResult(Message, frozen=True):
    entries: list[WorkStatus]
    cursor: int
    more: bool


class Heartbeat(Message, frozen=True):
    """A node is alive; counters are for display only."""

    state: str
    version: int  # policy in the engine; -1: none yet
    counters: dict[str, float]


class HeartbeatResult(Message, frozen=True):
    announcement: Announcement | None
    clock_ms: int
    next_index: int  # next unit index expected of this node for the head version
    notices: list[str]


class GetEvidence(Message, frozen=True):
    """Ask for an evidence bundle (body) by its SHA-256."""

    evidence_hash: bytes


class GetEvidenceResult(Message, frozen=True):
    size_bytes: int


class GetWorkFile(Message, frozen=True):
    """Ask for a version's work file (body) by its SHA-256."""

    data_hash: bytes


class GetWorkFileResult(Message, frozen=True):
    size_bytes: int


# --- validators ----------------------------------------------------------------------------------


class JobKind(StrEnum):
    """What a validator may be asked to do."""

    JUDGE = "judge"  # a submission
    REVIEW = "review"  # a submission that another validator found suspect
    CASE = "case"  # replay the evidence of a slashing case and sign a decision
    ROOT = "root"  # check a work file and sign its root


class ValidatorJob(Message, frozen=True):
    """Claim the next job of one of these kinds."""

    kinds: list[JobKind]


class JudgeJob(Message, frozen=True, omit_defaults=True):
    """Judge or review a submission; the body is the rollout file.

    The job's id is `work_file.judge_job_id` of these fields, so that a verdict's signature covers them.
    """

    version: int
    checkpoint_hash: bytes
    block_hash: bytes
    node: bytes
    index: int
    file_hash: bytes
    size_bytes: int
    work_signature: bytes
    received_at_ms: int
    attempt: int
    audit: bool = True  # False: the unit was not drawn, checks 10 to 12 may be left out


class CaseJob(Message, frozen=True):
    """Decide a slashing case; the body is the evidence bundle."""

    case_id: int
    evidence_hash: bytes
    size_bytes: int


class RootJob(Message, frozen=True):
    """Sign the work root of some versions; the body is the work file."""

    data_hash: bytes
    size_bytes: int
    versions: list[int]


class ValidatorJobResult(Message, frozen=True):
    """At most one of the three jobs is set."""

    job_id: bytes = b""
    lease_s: float = 0.0
    judge: JudgeJob | None = None
    case: CaseJob | None = None
    root: RootJob | None = None


class JobHeartbeat(Message, frozen=True):
    """Extend the lease of a claimed job."""

    job_id: bytes


class JobHeartbeatResult(Message, frozen=True):
    lease_s: float


class JudgeVerdict(Message, frozen=True):
    """Content of a verdict on a submission; the body is the judged batch file if accepted."""

    outcome: str  # "accepted" | "rejected" | "suspect" | "inconclusive"
    fraud: bool
    findings: list[FindingNote]
    batch_hash: bytes  # SHA-256 of the body; empty if there is none
    rows: int
    tokens: int
    seconds: float
    secret: bytes = b""  # chose the indices of the commitments' negative check; an audit repeats it
    audited: bool | msgspec.UnsetType = msgspec.UNSET  # False: checks 10 to 12 were left out

    @property
    def is_audited(self) -> bool:
        """Whether nothing was left out."""
        return self.audited is not False


class CaseVerdict(Message, frozen=True):
    """Content of a decision: an EIP-712 signature for the court, or an abstention."""

    case_id: int
    uphold: bool
    signature: bytes  # empty: abstains
    text: str


class RootVerdict(Message, frozen=True):
    """Content of a work root's confirmation: an EIP-712 signature for the work ledger."""

    data_hash: bytes
    signature: bytes  # empty: refused
    text: str


class Verdict(Message, frozen=True):
    """A validator's signed answer to a job; `content` is canonical msgpack of one of the above."""

    job_id: bytes
    content: bytes
    signature: bytes  # validator key over `keys.verdict_digest`


class ShowReceipt(Message, frozen=True):
    """Show a receipt to a validator, which then signs no work root that leaves the unit out."""

    receipt: Receipt


class ShowReceiptResult(Message, frozen=True):
    kept: bool


class VerdictResult(Message, frozen=True):
    """The verdict is on disk."""

    stored: bool


class VerdictNotice(Message, frozen=True):
    """Gossip on the verdicts topic: the coordinator's word on one submission."""

    run_id: bytes
    node: bytes
    version: int
    index: int
    state: SubmissionState
    code: str  # reason code of the first finding, "" if accepted
    case_id: int | None
    signature: bytes  # coordinator key over `digest`

    def digest(self) -> bytes:
        """The 32 bytes that are signed: all other fields, under the domain ``intellect/verdict-notice/1``."""
        unsigned = msgspec.structs.replace(self, signature=b"")
        return sha256(b"intellect/verdict-notice/1", encode(unsigned))

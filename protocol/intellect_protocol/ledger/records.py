"""What the contracts answer. Amounts are in the smallest unit of the stake token (10^-18 of one token),
times in seconds since 1970 on the chain's clock, addresses EIP-55 text, hashes 32 bytes."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Offence(IntEnum):
    """Kinds of offence, as in `SlashCourt.Offence`. An upheld fraud bars the owner."""

    FRAUD = 0
    EQUIVOCATION = 1


class CaseStatus(IntEnum):
    """States of a case, as in `SlashCourt.Status`."""

    OPEN = 1
    APPEALED = 2
    UPHELD = 3
    DISMISSED = 4
    EXPIRED = 5

    @property
    def ongoing(self) -> bool:
        """Whether a verdict is still due."""
        return self in (CaseStatus.OPEN, CaseStatus.APPEALED)


class StakeAccount(msgspec.Struct, frozen=True):
    """An owner's stake. `frozen` may exceed `active + unbonding`; what it covers cannot leave."""

    active: int
    unbonding: int
    release_at: int
    frozen: int

    @property
    def total(self) -> int:
        """All that can be seized."""
        return self.active + self.unbonding


class NodeBinding(msgspec.Struct, frozen=True):
    """Whose node key it is, and under which peer id it is reached."""

    owner: str
    peer_id: bytes
    bound_block: int
    bound_at: int


class RunRecord(msgspec.Struct, frozen=True):
    """An opened run. `latest_version` is None until the first checkpoint is recorded."""

    publisher: str
    latest_version: int | None


class RecordedCheckpoint(msgspec.Struct, frozen=True):
    """C as recorded on the ledger, with B, the hash of the block it landed in."""

    checkpoint_hash: bytes
    block_number: int
    block_hash: bytes
    recorded_at: int


class ValidatorSetState(msgspec.Struct, frozen=True):
    """A validator set; `members` ascend by address bytes, as signatures of a quorum must."""

    set_id: int
    members: tuple[str, ...]
    threshold: int


class WorkEntry(msgspec.Struct, frozen=True):
    """What validators commit to for one version.

    `revision` is 0 for the first commitment of a version and one more after each void; `root` is the
    Merkle root of the work leaves; `data_hash` is the SHA-256 of the file that holds them.
    """

    version: int
    revision: int
    root: bytes
    data_hash: bytes
    accepted: int
    rejected: int
    units: int


class WorkCommit(msgspec.Struct, frozen=True):
    """One commitment over one or several versions, as a quorum of the set `set_id` signs it."""

    run_id: bytes
    set_id: int
    entries: tuple[WorkEntry, ...]


class WorkRecord(msgspec.Struct, frozen=True):
    """The committed work of a version; if none, `committed_at` is 0 and `revision` the next to sign."""

    root: bytes
    data_hash: bytes
    accepted: int
    rejected: int
    units: int
    revision: int
    committed_at: int


class Case(msgspec.Struct, frozen=True):
    """A slashing case. `window_ends_at` and `decide_by` are the last seconds to appeal and to decide."""

    case_id: int
    accused: str
    node: str
    reporter: str
    offence: Offence
    status: CaseStatus
    amount: int
    bond: int
    seized: int
    opened_at: int
    window_ends_at: int
    decide_by: int
    set_id: int
    evidence_hash: bytes
    defence_hash: bytes


class CourtTerms(msgspec.Struct, frozen=True):
    """What holds for every case opened now: times in seconds, amounts in units of 10^-18 token."""

    window_s: int
    voting_s: int
    bond: int
    fraud_cap: int
    equivocation_cap: int
    account_cap: int
    cap_period_s: int


class Block(msgspec.Struct, frozen=True):
    """A block header, as far as we read it."""

    number: int
    hash: bytes
    time: int


class Receipt(msgspec.Struct, frozen=True):
    """A transaction that was mined and did not revert; `contract` is what it created, if it did."""

    transaction_hash: bytes
    block_number: int
    gas_used: int
    contract: str | None = None

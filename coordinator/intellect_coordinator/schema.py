"""Tables of the coordinator's database, and how an older database becomes the present one.

Plain SQLAlchemy Core with types that SQLite and PostgreSQL share. Times are Unix milliseconds, hashes
32 raw bytes, node keys 20 raw address bytes, owners and validators EIP-55 text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    true,
    update,
)

from intellect_protocol.errors import ConfigError

metadata = MetaData()

# SQLite numbers rows by itself only in an INTEGER column.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")


def _hash(name: str, *, nullable: bool = False) -> Column[bytes]:
    return Column(name, LargeBinary(32), nullable=nullable)


def _node() -> Column[bytes]:
    return Column("node", LargeBinary(20), nullable=False)


def _time(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

submissions = Table(
    "submissions",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=True),
    _node(),
    Column("owner", String(42), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("unit_index", BigInteger, nullable=False),
    _hash("checkpoint_hash"),
    _hash("block_hash"),
    _hash("file_hash"),
    Column("size_bytes", BigInteger, nullable=False),
    Column("work_signature", LargeBinary(65), nullable=False),
    Column("receipt_signature", LargeBinary(65), nullable=False),
    Column("state", String(16), nullable=False),
    Column("training", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("fraud", Boolean, nullable=False),
    Column("audit", Boolean, nullable=False, server_default=true()),  # drawn: checks 10 to 12 must run
    Column("code", String(64), nullable=False),  # of the finding that decided, "" if none did
    _hash("batch_hash", nullable=True),
    Column("rows", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("case_id", BigInteger),
    _time("received_at_ms"),
    _time("queued_at_ms"),
    _time("judged_at_ms", nullable=True),
    _time("trained_at_ms", nullable=True),
    # Grows with every change of any row: the cursor of GetVerdicts.
    Column("change", BigInteger, nullable=False),
    UniqueConstraint("node", "version", "unit_index", name="one_submission_per_unit"),
    Index("submissions_by_change", "change"),
    Index("submissions_by_node_change", "node", "change"),
    Index("submissions_by_version", "version", "state"),
    Index("submissions_by_owner", "owner", "version"),
    Index("submissions_by_batch", "batch_hash"),
)

precommits = Table(
    "precommits",
    metadata,
    _node(),
    Column("version", BigInteger, nullable=False),
    Column("unit_index", BigInteger, nullable=False),
    _hash("file_hash"),
    Column("size_bytes", BigInteger, nullable=False),
    _time("deadline_ms"),
    UniqueConstraint("node", "version", "unit_index", name="one_precommit_per_unit"),
    Index("precommits_by_version", "version", "deadline_ms"),
)

abandons = Table(
    "abandons",
    metadata,
    _node(),
    Column("owner", String(42), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("unit_index", BigInteger, nullable=False),
    _time("at_ms"),
    UniqueConstraint("node", "version", "unit_index", name="one_abandon_per_unit"),
    Index("abandons_by_owner", "owner", "version"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", LargeBinary(32), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("kind", String(8), nullable=False),
    Column("state", String(8), nullable=False),  # queued | leased | done
    Column("submission_id", BigInteger),
    _hash("evidence_hash", nullable=True),
    _hash("data_hash", nullable=True),
    Column("attempt", Integer, nullable=False),
    Column("leases", Integer, nullable=False),  # how often it was handed out
    Column("assigned_to", String(42)),  # only this validator may claim it
    Column("not_for", String(42)),  # anybody but this one
    Column("validator", String(42)),  # holds the lease, or answered
    _time("not_before_ms"),
    _time("lease_until_ms", nullable=True),
    Index("jobs_by_state", "state", "kind", "seq"),
    Index("jobs_by_submission", "submission_id"),
    Index("jobs_by_evidence", "evidence_hash"),
    Index("jobs_by_data", "data_hash"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("job_id", LargeBinary(32), primary_key=True),
    Column("submission_id", BigInteger),
    _hash("evidence_hash", nullable=True),
    _hash("data_hash", nullable=True),
    Column("validator", String(42), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("signature", LargeBinary(65), nullable=False),
    Column("decision", LargeBinary(65)),  # EIP-712 signature for the court or the work ledger
    _time("at_ms"),
    Index("verdicts_by_submission", "submission_id"),
    Index("verdicts_by_evidence", "evidence_hash"),
    Index("verdicts_by_data", "data_hash"),
)

findings = Table(
    "findings",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=True),
    Column("submission_id", BigInteger, nullable=False),
    Column("job_id", LargeBinary(32), nullable=False),
    Column("position", Integer, nullable=False),
    Column("check_name", String(64), nullable=False),
    Column("code", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("row", Integer),
    Column("measured", Float),
    Column("limit", Float),
    Column("text", Text, nullable=False),
    Index("findings_by_submission", "submission_id"),
)

cases = Table(
    "cases",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=True),
    Column("submission_id", BigInteger, nullable=False, unique=True),
    Column("job_id", LargeBinary(32), nullable=False),  # whose verdict found the fraud
    Column("owner", String(42), nullable=False),
    _node(),
    Column("code", String(64), nullable=False),
    Column("state", String(16), nullable=False),  # see `slashing.CaseState`
    Column("evidence_hash", LargeBinary(32), unique=True),
    Column("case_id", BigInteger),
    # Defence for which jobs were made: an appeal changes what the validators sign.
    _hash("defence_hash", nullable=True),
    Column("seized", String(78), nullable=False),  # decimal, 10^-18 token
    _time("found_at_ms"),
    _time("opened_at_ms", nullable=True),
    _time("ended_at_ms", nullable=True),
    Index("cases_by_owner", "owner", "state"),
    Index("cases_by_state", "state"),
)

roots = Table(
    "roots",
    metadata,
    _hash("data_hash"),
    Column("version", BigInteger, nullable=False),
    Column("revision", Integer, nullable=False),
    _hash("root"),
    Column("accepted", Integer, nullable=False),
    Column("rejected", Integer, nullable=False),
    Column("units", BigInteger, nullable=False),
    Column("set_id", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", String(16), nullable=False),  # see `root_state.RootState`
    _time("at_ms"),
    UniqueConstraint("data_hash", "version", name="one_root_per_version_and_file"),
    Index("roots_by_version", "version", "state"),
)

ledger_events = Table(
    "ledger_events",
    metadata,
    Column("block_number", BigInteger, nullable=False),
    Column("log_index", Integer, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("content", LargeBinary, nullable=False),
    UniqueConstraint("block_number", "log_index", name="one_row_per_event"),
)

cursors = Table(
    "cursors",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=True),
    _time("at_ms"),
    Column("text", Text, nullable=False),
)


def _create_all(connection: Connection) -> None:
    metadata.create_all(connection)


def _add_audit(connection: Connection) -> None:
    """Units of before were all audited."""
    if "audit" not in {column["name"] for column in inspect(connection).get_columns("submissions")}:
        connection.exec_driver_sql("ALTER TABLE submissions ADD COLUMN audit BOOLEAN DEFAULT TRUE NOT NULL")


# Migration i brings a database from version i to version i + 1, inside one transaction with the number.
MIGRATIONS: Sequence[Callable[[Connection], None]] = (_create_all, _add_audit)


def migrate(connection: Connection) -> None:
    """Bring the database to the present version; call inside a transaction.

    Raises:
        ConfigError: the database was written by a newer program.
    """
    present = 0
    if inspect(connection).has_table(schema_version.name):
        present = connection.scalar(select(func.max(schema_version.c.version))) or 0
    if present > len(MIGRATIONS):
        raise ConfigError(
            f"the database has schema version {present}; this program knows up to {len(MIGRATIONS)}"
        )
    for step in MIGRATIONS[present:]:
        step(connection)
    if present == 0:
        connection.execute(insert(schema_version).values(version=len(MIGRATIONS)))
    elif present < len(MIGRATIONS):
        connection.execute(update(schema_version).values(version=len(MIGRATIONS)))

"""`intellect-coordinator serve`: all of the coordinator's duties in one process.

    intake      what nodes hand in                     desk       what validators fetch and bring back
    standing    the ledger's word on owners            slashing   cases
    roots       work roots                             outcomes   what the trainer did with batches

Each duty is a task of its own with its own failures: the chain being away stops cases and roots, not the
intake of known nodes. Whatever was acknowledged is in the database or on disk before the answer leaves, so
the whole process may be killed at any point and started again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
from sqlalchemy import Connection, select

from intellect_protocol.errors import IntellectError, RefusedError, UsageError, WalletError
from intellect_protocol.file_lock import try_lock
from intellect_protocol.keys import LocalSigner, PeerKey
from intellect_protocol.messages import (
    Abandon,
    GetEvidence,
    GetEvidenceResult,
    GetVerdicts,
    GetWorkFile,
    GetWorkFileResult,
    Heartbeat,
    HeartbeatResult,
    JobHeartbeat,
    Precommit,
    SubmissionState,
    Submit,
    ValidatorJob,
    Verdict,
    VerdictNotice,
)
from intellect_protocol.run import RunConfig

from . import schema, submissions
from .audit_desk import AuditDesk
from .background import patiently, repeat, run_child
from .batches import BatchStore
from .blobs import BlobStore
from .intake import Intake, IntakeLimits, now_ms
from .job_desk import DeskLimits, JobDesk
from .jobs import Bell
from .outcomes import take_outcomes
from .presence import Presence
from .roots import Roots
from .slashing import Slashing
from .standing import Standing
from .status import head_of, snapshot, write_status
from .store import Store

if TYPE_CHECKING:
    from intellect_protocol.network.rpc_server import Call, Reply
    from intellect_protocol.network.swarm import Swarm

_MAX_NOTICES = 256

logger = logging.getLogger(__name__)


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` needs to know."""

    run: RunConfig
    signer: LocalSigner
    data_dir: Path
    batches: Path
    database: str = ""  # SQLAlchemy URL; "": SQLite in the data directory
    listen: list[str]
    confirmations: int = 0
    root_interval_s: float = 10.0
    intake: IntakeLimits = IntakeLimits()
    desk: DeskLimits = DeskLimits()
    web_host: str = "127.0.0.1"
    web_port: int | None = None


class Coordinator:
    """The duties over one database; `attach` gives them a swarm."""

    def __init__(self, options: ServiceOptions, swarm: Swarm, store: Store) -> None:
        self._options = options
        self._swarm = swarm
        self._store = store
        config, signer = options.run, options.signer
        self.blobs = BlobStore(options.data_dir / "blobs")
        self.batches = BatchStore(options.batches)
        self.bell = Bell()
        self.presence = Presence()
        self.standing = Standing(store, swarm.ledger, confirmations=options.confirmations)
        self.audits = AuditDesk(config, signer, self.standing.book, swarm.ledger)
        self.intake = Intake(
            store,
            self.blobs,
            self.standing,
            swarm.heads,
            config,
            signer,
            self.bell,
            self.audits,
            limits=options.intake,
        )
        self.desk = JobDesk(
            store,
            self.blobs,
            self.batches,
            self.standing,
            config,
            self.bell,
            concluded=self._tell_state,
            limits=options.desk,
        )
        self.slashing = Slashing(
            store,
            self.blobs,
            swarm.ledger,
            swarm.heads,
            config,
            signer,
            self.bell,
            concluded=self._tell,
            clock_ms=now_ms,
        )
        self.roots = Roots(
            store,
            self.blobs,
            swarm.ledger,
            swarm.heads,
            config,
            signer,
            self.bell,
            self.audits,
            interval_s=options.root_interval_s,
            clock_ms=now_ms,
        )
        self._notices, self._notices_out = trio.open_memory_channel[int](_MAX_NOTICES)

    def register(self) -> None:
        """Serve the coordinator's requests on the swarm."""
        window = self._options.run.revision.window
        server = self._swarm.server
        server.register(Precommit, self._precommit, signed=True)
        server.register(Submit, self._submit, signed=True, max_body_bytes=window.max_submission_bytes)
        server.register(Abandon, self._abandon, signed=True)
        server.register(GetVerdicts, self._get_verdicts, signed=True)
        server.register(Heartbeat, self._heartbeat, signed=True)
        server.register(ValidatorJob, self._validator_job, signed=True)
        server.register(JobHeartbeat, self._job_heartbeat, signed=True)
        server.register(Verdict, self._verdict, signed=True, max_body_bytes=window.max_submission_bytes)
        server.register(GetEvidence, self._get_evidence, access="public")
        server.register(GetWorkFile, self._get_work_file, access="public")

    async def run(self) -> None:
        """All duties, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.desk.run)
            nursery.start_soon(self.slashing.run)
            nursery.start_soon(self.roots.run)
            nursery.start_soon(self._gossip)
            if self._options.web_port is not None:
                nursery.start_soon(self._serve_web)
            nursery.start_soon(repeat, "following the ledger", self._follow_ledger)
            nursery.start_soon(repeat, "reading the trainer's outcomes", self._take_outcomes)
            nursery.start_soon(repeat, "writing the status", self._write_status)

    # --- nodes -----------------------------------------------------------------------------------

    async def _precommit(self, call: Call[Precommit]) -> Reply:
        return _reply(await self.intake.precommit(call.signer, call.payload))

    async def _submit(self, call: Call[Submit]) -> Reply:
        body = await trio.to_thread.run_sync(call.body.read)
        return _reply(await self.intake.submit(call.signer, call.payload, body))

    async def _abandon(self, call: Call[Abandon]) -> Reply:
        return _reply(await self.intake.abandon(call.signer, call.payload))

    async def _get_verdicts(self, call: Call[GetVerdicts]) -> Reply:
        return _reply(await self.intake.verdicts(call.signer, call.payload))

    async def _heartbeat(self, call: Call[Heartbeat]) -> Reply:
        now = now_ms()
        self.presence.heard(call.signer, call.payload, now)
        notices = []
        try:
            await self.standing.check(call.signer, None)
        except RefusedError as error:
            notices.append(str(error))
        return _reply(
            HeartbeatResult(
                announcement=self._swarm.heads.head,
                clock_ms=now,
                next_index=await self.intake.next_index(call.signer),
                notices=notices,
            )
        )

    # --- validators ------------------------------------------------------------------------------

    async def _validator_job(self, call: Call[ValidatorJob]) -> Reply:
        job, body = await self.desk.claim(call.signer, call.payload)
        return _reply(job, body)

    async def _job_heartbeat(self, call: Call[JobHeartbeat]) -> Reply:
        return _reply(await self.desk.heartbeat(call.signer, call.payload))

    async def _verdict(self, call: Call[Verdict]) -> Reply:
        body = await trio.to_thread.run_sync(call.body.read)
        return _reply(await self.desk.verdict(call.signer, call.payload, body))

    # --- anybody ---------------------------------------------------------------------------------

    async def _get_evidence(self, call: Call[GetEvidence]) -> Reply:
        return await self._published(call.payload.evidence_hash, _is_evidence, GetEvidenceResult)

    async def _get_work_file(self, call: Call[GetWorkFile]) -> Reply:
        return await self._published(call.payload.data_hash, _is_work_file, GetWorkFileResult)

    async def _published(
        self,
        digest: bytes,
        is_public: Callable[[Connection, bytes], bool],
        result: Callable[[int], msgspec.Struct],
    ) -> Reply:
        if len(digest) != 32 or not await self._store.read(lambda connection: is_public(connection, digest)):
            raise RefusedError("unknown_hash", "there is no such file here")
        path = self.blobs.path(digest)
        return _reply(result(path.stat().st_size), path)

    # --- gossip ----------------------------------------------------------------------------------

    async def _tell_state(self, submission_id: int, state: SubmissionState) -> None:
        await self._tell(submission_id)

    async def _tell(self, submission_id: int) -> None:
        """Have a submission's state gossiped; dropped if too many wait: nodes ask anyway."""
        try:
            self._notices.send_nowait(submission_id)
        except trio.WouldBlock:
            logger.debug("too many notices wait; one is dropped")

    async def _gossip(self) -> None:
        async for submission_id in self._notices_out:
            row = await self._store.read(partial(submissions.get, submission_id=submission_id))
            if row is None:
                continue
            notice = VerdictNotice(
                run_id=self._options.run.run_id,
                node=row.node,
                version=row.version,
                index=row.unit_index,
                state=SubmissionState(row.state),
                code=row.code,
                case_id=row.case_id,
                signature=b"",
            )
            signature = self._options.signer.sign_digest(notice.digest())
            try:
                await self._swarm.publish_verdict(msgspec.structs.replace(notice, signature=signature))
            except IntellectError as error:
                logger.debug("gossip: %s", error)

    # --- followers -------------------------------------------------------------------------------

    async def _follow_ledger(self) -> None:
        await self.standing.sync()

    async def _take_outcomes(self) -> None:
        await take_outcomes(self._store, self.batches, now_ms())

    async def _serve_web(self) -> None:
        """The web page, in a process of its own that reads the database and ends with this one."""
        options = self._options
        arguments = ["--data-dir", str(options.data_dir), "--host", options.web_host]
        if options.database:
            arguments += ["--database", options.database]
        code = await run_child(["web", *arguments, "--port", str(options.web_port), "--until-stdin-closes"])
        logger.warning("the web page ended with status %d; everything else goes on", code)

    async def _write_status(self) -> None:
        content = await self._store.read(snapshot)
        content["head"] = head_of(self._swarm.heads.head)
        heard = self.presence.view()
        content["nodes"] = [
            {**node, "heard": heard.get(node["node"]), "stake": self._stake(node["owner"])}
            for node in content["nodes"]
        ]
        await trio.to_thread.run_sync(write_status, self._options.data_dir, content)

    def _stake(self, owner: str) -> float:
        book = self.standing.book
        return (book.active(owner) + book.unbonding(owner)) / 1e18


def _reply(result: msgspec.Struct, body: Path | None = None) -> Reply:
    from intellect_protocol.network.rpc_server import Reply

    return Reply(result, body)


def _is_evidence(connection: Connection, digest: bytes) -> bool:
    table = schema.cases
    found = connection.scalar(select(table.c.case_id).where(table.c.evidence_hash == digest))
    return found is not None


def _is_work_file(connection: Connection, digest: bytes) -> bool:
    table = schema.roots
    return connection.scalar(select(table.c.version).where(table.c.data_hash == digest).limit(1)) is not None


@asynccontextmanager
async def open_coordinator(options: ServiceOptions) -> AsyncIterator[Coordinator]:
    """Open database, swarm and duties; leaving the block closes all of them.

    Raises:
        WalletError: the key is not the run's coordinator key.
        UsageError: another coordinator uses the data directory.
        UnreachableError: the chain does not answer.
    """
    from intellect_protocol.network.swarm import SwarmOptions, open_swarm

    if options.signer.address != options.run.terms.keys.coordinator:
        raise WalletError(
            f"the key is {options.signer.address}, the run's coordinator is "
            f"{options.run.terms.keys.coordinator}"
        )
    options.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = try_lock(options.data_dir / "lock")
    if lock is None:
        raise UsageError(f"{options.data_dir}: another coordinator runs here")
    with lock:
        store = Store(options.database or f"sqlite:///{options.data_dir / 'coordinator.sqlite'}")
        try:
            swarm_options = SwarmOptions(
                role="coordinator",
                data_dir=options.data_dir,
                config=options.run,
                peer_key=PeerKey.load_or_create(options.data_dir / "peer.key"),
                signer=options.signer,
                listen=options.listen,
                require_bootstrap=False,
            )
            async with open_swarm(swarm_options) as swarm:
                coordinator = Coordinator(options, swarm, store)
                coordinator.register()
                await patiently(coordinator.standing.open)
                await patiently(coordinator.audits.open)
                yield coordinator
        finally:
            store.close()


async def serve(options: ServiceOptions) -> None:
    """Run a coordinator until cancelled. Errors as `open_coordinator`."""
    async with open_coordinator(options) as coordinator:
        logger.info("coordinator of run %s is up", options.run.run_id.hex()[:16])
        await coordinator.run()

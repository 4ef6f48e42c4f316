"""The node's daemon: one service per duty, all in one nursery, the engine in a child process.

    follower    newest policy onto the disk (`weights`)
    generator   policy -> unit -> signed history (`generator`, `rollout`, `history`)
    outbox      signed units -> receipts (`outbox`)
    verdicts    what became of them, by polling and by gossip
    heartbeat   the coordinator's clock, notices and expected index
    standing    stake and bans, from the ledger
    status      `status.json`

A service ends only by an error that ends the node (slashed, upgrade required, disk gone, engine
unusable) or by cancellation; everything passing is handled inside it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import trio

from intellect_protocol.errors import (
    InvalidDataError,
    PreflightError,
    RefusedError,
    SlashedError,
    UnreachableError,
)
from intellect_protocol.keys import address_bytes, peer_id_text
from intellect_protocol.messages import Heartbeat, HeartbeatResult, SubmissionState

from .bell import Bell
from .config import TOKEN_DECIMALS
from .entries import REFUSED, SIGNED, Entry, Kind
from .generator import BuilderFactory, Generator
from .history import History
from .outbox import Outbox, Verdicts, now_ms, raise_if_slashed
from .prepare import PreparedNode
from .rollout import UnitBuilder
from .status import NodeStatus, write_status
from .weights import PolicyFollower

if TYPE_CHECKING:
    from intellect_protocol.network.swarm import Swarm

_STATUS_EVERY_S = 1.0
_STANDING_POLL_S = 60.0
_SUSPECTED_POLL_S = 3.0
# Refusals after which no later unit of the same version can be taken either.
_VERSION_CLOSED = frozenset(
    {"stale_version", "units_exhausted", "index_gap", "index_used", "bound_too_late", "staked_too_late"}
    | {"abandons_exhausted", "conflicting_submission", "already_submitted", "file_lost"}
)
_LOST_STANDING = frozenset({"stake_too_low", "stake_frozen", "unbonding", "not_bound"})

logger = logging.getLogger(__name__)


class NodeDaemon:
    """A registered node at work."""

    def __init__(self, node: PreparedNode, *, builder_factory: BuilderFactory = UnitBuilder) -> None:
        self._node = node
        self._settings = node.settings
        self._run = node.run
        self._factory = builder_factory
        self._changed = Bell()  # anything the generator may be waiting for
        self._suspected = Bell()  # a reason to look at the ledger now
        self._told_notices: set[str] = set()
        self._pruned_at = -1  # head version
        self._history: History
        self._follower: PolicyFollower
        self._outbox: Outbox
        self._verdicts: Verdicts
        self._generator: Generator
        identity = node.identity
        self.status = NodeStatus(
            name=self._settings.name or identity.node.address[:10],
            pid=os.getpid(),
            run=self._run.terms.name,
            run_id=self._run.run_id.hex(),
            registered=True,
            node=identity.node.address,
            wallet=identity.wallet.address,
            peer_id=peer_id_text(identity.peer.peer_id),
            stake=node.stake / 10**TOKEN_DECIMALS,
            started_ms=now_ms(),
        )

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            SlashedError: the wallet is barred from the run.
            UpgradeRequiredError: the run needs a newer protocol version.
            UnreachableError: no known peer of the run answers at the start.
            PreflightError, EngineError: this machine or its engine cannot do the work.
        """
        from intellect_protocol.network.swarm import SwarmOptions, open_swarm

        identity = self._node.identity
        write_status(self._node.data_dir, self.status)
        self._history = History(self._node.data_dir, self._run.run_id, identity.node.address)
        try:
            await trio.to_thread.run_sync(self._history.sweep)
            options = SwarmOptions(
                role="node",
                data_dir=self._node.data_dir,
                config=self._run,
                peer_key=identity.peer,
                signer=identity.node,
                listen=self._settings.listen,
                weights=True,
                data_port=self._settings.data_port,
            )
            self._say("joining the swarm")
            async with open_swarm(options) as swarm, trio.open_nursery() as nursery:
                self._build_services(swarm)
                nursery.start_soon(self._follower.run)
                nursery.start_soon(self._outbox.run)
                nursery.start_soon(self._verdicts.run)
                nursery.start_soon(self._generator.run)
                nursery.start_soon(self._hear_verdicts, swarm)
                nursery.start_soon(self._send_heartbeats, swarm)
                nursery.start_soon(self._watch_standing, swarm)
                nursery.start_soon(self._write_status, swarm)
        finally:
            self.status.state, self.status.waiting_for = "stopped", ""
            write_status(self._node.data_dir, self.status)
            self._history.close()

    def _build_services(self, swarm: Swarm) -> None:
        if swarm.policies is None:
            raise PreflightError("the swarm was opened without weights")
        self._follower = PolicyFollower(
            swarm.heads,
            swarm.policies,
            retain_versions=self._settings.retain_versions,
            changed=self._changed,
            tell=self._say,
        )
        self._outbox = Outbox(
            self._history,
            swarm.call_coordinator,
            run_id=self._run.run_id,
            node=self._node.identity.node.address,
            coordinator=self._run.terms.keys.coordinator,
            settings=self._settings,
            on_settled=self._settled,
            on_refused=self._refused,
        )
        self._verdicts = Verdicts(self._history, swarm.call_coordinator, self._settings, self._judged)
        self._generator = Generator(
            self._node,
            self._history,
            self._follower,
            self._outbox,
            self.status,
            changed=self._changed,
            say=self._say,
            builder_factory=self._factory,
        )

    # What the other services report

    def _settled(self, entry: Entry) -> None:
        self._changed.ring()
        self._verdicts.wake()

    def _refused(self, entry: Entry, error: RefusedError) -> None:
        self._say(f"unit {entry.version}/{entry.index} refused: {error}")
        if error.code in _VERSION_CLOSED:
            self._generator.close_version(entry.version, str(error))
        if error.code in _LOST_STANDING:
            self._suspected.ring()
        self._changed.ring()

    def _judged(self, entry: Entry) -> None:
        if entry.kind is Kind.ABANDON:
            return
        text = f"unit {entry.version}/{entry.index} {entry.state}"
        self._say(text + (f": {entry.code}" if entry.code else ""))
        if entry.state == SubmissionState.REJECTED:
            self._suspected.ring()
        self._changed.ring()

    async def _hear_verdicts(self, swarm: Swarm) -> None:
        """Gossip is a hint that there is something to fetch."""
        node = address_bytes(self._node.identity.node.address)
        async for notice in swarm.verdicts():
            if notice.node == node:
                self._verdicts.wake()

    async def _send_heartbeats(self, swarm: Swarm) -> None:
        while True:
            counters = {
                "tokens_per_s": self._generator.speed.per_s(),
                "units": float(self.status.units_submitted),
            }
            request = Heartbeat(self.status.state, self.status.version, counters)
            try:
                answer, _ = await swarm.call_coordinator(
                    request, HeartbeatResult, deadline_s=self._settings.request_deadline_s
                )
            except RefusedError as error:
                raise_if_slashed(error)
                if error.code == "already_active":
                    raise
                logger.info("heartbeat refused: %s", error)
            except (UnreachableError, InvalidDataError) as error:
                logger.info("heartbeat: %s", error)
            else:
                self._heard_from_coordinator(answer)
            await trio.sleep(self._settings.heartbeat_s)

    def _heard_from_coordinator(self, answer: HeartbeatResult) -> None:
        first = self.status.coordinator_seen_ms is None
        self.status.coordinator_seen_ms = now_ms()
        self.status.clock_skew_s = (now_ms() - answer.clock_ms) / 1000
        if answer.announcement is not None:
            self._generator.expect(answer.announcement.version, answer.next_index)
        for notice in answer.notices[:16]:
            if notice not in self._told_notices and len(self._told_notices) < 1024:
                self._told_notices.add(notice)
                self._say(f"notice of the coordinator: {notice[:300]}")
        if first:
            self._changed.ring()

    async def _watch_standing(self, swarm: Swarm) -> None:
        """Stake and bans: often while something is wrong, else now and then."""
        wallet = self._node.identity.wallet.address
        pause_s = _STANDING_POLL_S
        while True:
            heard = self._suspected.listen()
            with trio.move_on_after(pause_s) as scope:
                await heard.wait()
            if not scope.cancelled_caught:
                pause_s = _SUSPECTED_POLL_S
            try:
                account = await swarm.ledger.account(wallet)
                barred = await swarm.ledger.is_barred(wallet)
            except (UnreachableError, InvalidDataError) as error:
                logger.info("ledger: %s", error)
                continue
            self.status.stake = account.active / 10**TOKEN_DECIMALS
            if barred:
                raise SlashedError("slashed", f"a fraud of wallet {wallet} was upheld and its stake seized")

    # Status

    def _say(self, text: str) -> None:
        self.status.last_event = text
        self._node.tell(text)

    async def _write_status(self, swarm: Swarm) -> None:
        while True:
            self._take_stock(swarm)
            await trio.to_thread.run_sync(self._count_and_write)
            await trio.sleep(_STATUS_EVERY_S)

    def _count_and_write(self) -> None:
        """The part of the status that comes from the disk; runs in a thread."""
        status, counts = self.status, self._history.counts()
        refused = counts.get(REFUSED, 0)
        status.units_waiting = counts.get(SIGNED, 0)
        status.units_accepted = counts.get(SubmissionState.ACCEPTED, 0)
        status.units_rejected = counts.get(SubmissionState.REJECTED, 0) + refused
        status.units_submitted = sum(counts.values()) - status.units_waiting - refused
        status.reasons = self._history.refusals()
        status.last_credited_version = self._history.last_credited_version()
        write_status(self._node.data_dir, status)
        if status.head > self._pruned_at:
            self._history.prune(status.head - self._settings.keep_files_versions)
            self._pruned_at = status.head

    def _take_stock(self, swarm: Swarm) -> None:
        status = self.status
        status.head = self._follower.head_version
        status.lag = max(0, status.head - status.version) if status.version >= 0 else 0
        status.tokens_per_s = self._generator.speed.per_s()
        status.peers = len(swarm.host.peers())
        if swarm.policies is not None:
            status.bytes_from_origin = swarm.policies.bytes_from_origin
            status.bytes_from_peers = swarm.policies.bytes_from_peers

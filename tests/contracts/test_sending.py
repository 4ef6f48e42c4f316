"""Transactions are mined exactly once, whatever the connection does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from web3.providers import BaseProvider
from world import DEPLOYER, OWNER, PUBLISHER, RUN, STRANGER, World, refused

from intellect_protocol.errors import DeadlineError, LedgerError, UnreachableError, UsageError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.chain import Chain
from intellect_protocol.ledger.fees import FeePolicy
from intellect_protocol.ledger.journal import TransactionJournal, TransactionState
from intellect_protocol.ledger.sending import TransactionQueue

RECEIVER = "0x00000000000000000000000000000000000000A1"


class LossyProvider(BaseProvider):
    """Loses requests on the way there, or answers on the way back, as a script says."""

    def __init__(self, inner: BaseProvider, losses: list[str]) -> None:
        super().__init__()
        self.inner = inner
        self.losses = losses
        # Called in place of sending a transaction, until it is None.
        self.instead_of_sending: Callable[[], None] | None = None

    def make_request(self, method: str, params: Any) -> Any:
        loss = self.losses.pop() if self.losses else "none"
        if loss == "request":
            raise UnreachableError("lost on the way there")
        if method == "eth_sendRawTransaction" and self.instead_of_sending is not None:
            self.instead_of_sending()
            raise UnreachableError("the chain is deaf to transactions")
        answer = self.inner.make_request(method, params)
        if loss == "answer":
            raise UnreachableError("lost on the way back")
        return answer


class LyingProvider(BaseProvider):
    """Changes the result of some methods."""

    def __init__(self, inner: BaseProvider, results: dict[str, Any]) -> None:
        super().__init__()
        self.inner = inner
        self.results = results

    def make_request(self, method: str, params: Any) -> Any:
        if method in self.results:
            return {"jsonrpc": "2.0", "id": 1, "result": self.results[method]}
        return self.inner.make_request(method, params)


def _queue(provider: BaseProvider, state_dir: Path | None, **options: Any) -> TransactionQueue:
    return TransactionQueue(Chain(provider), state_dir, poll_s=0.001, max_poll_s=0.004, **options)


def _nonce(world: World, key: LocalSigner) -> int:
    return world.chain.nonce(key.address_bytes)


def _received(world: World) -> int:
    return world.chain.balance(bytes.fromhex(RECEIVER[2:]))


async def test_concurrent_sends_of_one_key_are_each_mined_once_without_gaps(world: World) -> None:
    queue = _queue(world.provider, world.folder / "many")
    before = _nonce(world, STRANGER)
    blocks: list[int] = []

    async def send() -> None:
        blocks.append((await queue.send(STRANGER, RECEIVER, value=1)).block_number)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(send)
    assert _nonce(world, STRANGER) == before + 20
    assert _received(world) == 20
    assert len(set(blocks)) == 20
    queue.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(losses=st.lists(st.sampled_from(["request", "answer", "none"]), max_size=60), seed=st.integers(0, 9))
async def test_lost_requests_and_answers_neither_lose_nor_double_a_transaction(
    world: World, losses: list[str], seed: int
) -> None:
    folder = world.folder / f"lossy-{random.Random().getrandbits(64)}"
    queue = _queue(LossyProvider(world.provider, losses), folder)
    before = _nonce(world, STRANGER), _received(world)
    for value in range(1, 4):
        await queue.send(STRANGER, RECEIVER, value=value)
    assert (_nonce(world, STRANGER) - before[0], _received(world) - before[1]) == (3, 6)
    queue.close()


async def test_a_caller_that_gives_up_leaves_the_transaction_to_the_next_start(world: World) -> None:
    before = _nonce(world, STRANGER)
    # Everything but the sending itself works, so the deadline passes with the transaction signed.
    provider = LossyProvider(world.provider, [])
    provider.instead_of_sending = lambda: None
    queue = _queue(provider, world.folder / "later", deadline_s=0.3)
    with pytest.raises(DeadlineError, match="stays queued"):
        await queue.send(STRANGER, RECEIVER, value=5, intent="pay")
    queue.close()
    assert _received(world) == 0
    restarted = _queue(world.provider, world.folder / "later")
    receipts = await restarted.resume()
    assert [receipt.block_number for receipt in receipts] == [world.chain.head.block_number]
    assert (await restarted.send(STRANGER, RECEIVER, value=5, intent="pay")) == receipts[0]
    assert (_received(world), _nonce(world, STRANGER)) == (5, before + 1)
    restarted.close()


async def test_pending_transactions_go_out_before_a_later_one(world: World) -> None:
    provider = LossyProvider(world.provider, [])
    provider.instead_of_sending = lambda: None
    queue = _queue(provider, world.folder / "order", deadline_s=0.2)
    for value in (1, 2):
        with pytest.raises(DeadlineError):
            await queue.send(STRANGER, RECEIVER, value=value)
    queue.close()
    restarted = _queue(world.provider, world.folder / "order")
    await restarted.send(STRANGER, RECEIVER, value=4)
    assert _received(world) == 7
    restarted.close()


async def test_the_same_intent_is_sent_once_and_another_is_sent_again(world: World) -> None:
    queue = _queue(world.provider, world.folder / "intents")
    first = await queue.send(STRANGER, RECEIVER, value=1, intent="a")
    assert await queue.send(STRANGER, RECEIVER, value=1, intent="a") == first
    await queue.send(STRANGER, RECEIVER, value=1, intent="b")
    await queue.send(STRANGER, RECEIVER, value=1)
    await queue.send(STRANGER, RECEIVER, value=1)
    assert _received(world) == 4
    queue.close()


async def test_what_would_revert_is_refused_by_name_before_anything_is_signed(world: World) -> None:
    before = _nonce(world, OWNER)
    await refused("StakeLedgerInsufficientStake", world.ledger.request_unbond(OWNER, 10**6))
    assert _nonce(world, OWNER) == before
    journal = TransactionJournal(
        world.folder / "state" / "transactions.sqlite", world.ledger._chain.genesis_hash()
    )
    assert journal.pending(OWNER.address) == []
    journal.close()


async def test_what_reverts_only_when_mined_is_refused_by_name_too_and_may_be_tried_again(
    world: World,
) -> None:
    await world.ledger.record_checkpoint(PUBLISHER, RUN, 3, b"C" * 32)
    before = _nonce(world, PUBLISHER)
    provider = LyingProvider(world.provider, {"eth_estimateGas": hex(300_000)})
    queue = _queue(provider, world.folder / "race")

    async def record(version: int) -> Any:
        return await queue.call(
            PUBLISHER,
            "WorkLedger",
            world.address("WorkLedger"),
            "record",
            RUN,
            version,
            b"D" * 32,
            intent=f"{version}",
        )

    for attempt in (1, 2):
        await refused("WorkLedgerAlreadyRecorded", record(3))
        assert _nonce(world, PUBLISHER) == before + attempt
    await record(4)
    queue.close()


async def test_a_nonce_taken_by_another_program_is_told(world: World) -> None:
    provider = LossyProvider(world.provider, [])
    queue = _queue(provider, world.folder / "taken")
    other = {
        "type": 2,
        "chainId": world.chain.chain_id,
        "nonce": _nonce(world, STRANGER),
        "to": RECEIVER,
        "value": 8,
        "data": b"",
        "gas": 21_000,
        "maxFeePerGas": 10**10,
        "maxPriorityFeePerGas": 1,
    }

    def overtake() -> None:
        provider.instead_of_sending = None
        world.provider.make_request("eth_sendRawTransaction", [f"0x{STRANGER.sign_transaction(other).hex()}"])

    provider.instead_of_sending = overtake
    await refused("NonceTaken", queue.send(STRANGER, RECEIVER, value=1))
    assert _received(world) == 8
    await queue.send(STRANGER, RECEIVER, value=1)
    assert _received(world) == 9
    queue.close()


async def test_a_key_without_means_signs_nothing(world: World) -> None:
    poor = LocalSigner.create()
    await refused("InsufficientFunds", world.ledger.transfer_eth(poor, RECEIVER, 0))
    assert _nonce(world, poor) == 0


async def test_fees_above_the_cap_are_waited_out_not_paid(world: World) -> None:
    before = _nonce(world, STRANGER)
    queue = _queue(world.provider, world.folder / "dear", fees=FeePolicy(max_fee_per_gas=1), deadline_s=0.3)
    with pytest.raises(DeadlineError):
        await queue.send(STRANGER, RECEIVER, value=1)
    assert _nonce(world, STRANGER) == before
    queue.close()


async def test_a_chain_made_anew_never_receives_what_was_meant_for_the_old_one(
    world: World, tmp_path: Path
) -> None:
    queue = _queue(world.provider, tmp_path / "state")
    await queue.send(STRANGER, RECEIVER, value=1, intent="once")
    queue.close()
    (tmp_path / "new").mkdir()
    fresh = World(tmp_path / "new")
    renewed = _queue(fresh.provider, tmp_path / "state")
    assert await renewed.resume() == []
    await renewed.send(STRANGER, RECEIVER, value=1, intent="once")
    assert _received(fresh) == 1
    renewed.close()
    fresh.close()


async def test_a_reader_cannot_send(world: World) -> None:
    queue = _queue(world.provider, None)
    with pytest.raises(UsageError):
        await queue.send(STRANGER, RECEIVER, value=1)


async def test_the_journal_says_how_each_transaction_ended(world: World) -> None:
    queue = _queue(world.provider, world.folder / "kept")
    receipt = await queue.send(DEPLOYER, RECEIVER, value=1, intent="x")
    queue.close()
    path = world.folder / "kept" / "transactions.sqlite"
    assert path.stat().st_mode & 0o077 == 0
    journal = TransactionJournal(path, world.ledger._chain.genesis_hash())
    kept = journal.latest(DEPLOYER.address, "x")
    assert kept is not None
    assert (kept.state, kept.block_number, kept.hash) == (
        TransactionState.MINED,
        receipt.block_number,
        receipt.transaction_hash,
    )
    journal.close()


async def test_a_malformed_answer_is_an_error_not_a_value(world: World) -> None:
    for nonsense in ("0xzz", None, {"a": 1}, "0x" + 70 * "f"):
        ledger = world.ledger
        chain = Chain(LyingProvider(world.provider, {"eth_getBlockByNumber": nonsense, "eth_call": nonsense}))
        with pytest.raises(LedgerError):
            chain.block()
        with pytest.raises(LedgerError):
            chain.view("StakeLedger", ledger.deployment.address("StakeLedger"), "accountOf", OWNER.address)

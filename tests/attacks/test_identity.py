"""Attacks on who did what: copies, gaps, ground keys, many wallets, replays, signatures over chosen bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from arena import Arena, codes
from coordinator_site import NODE as SITE_NODE
from coordinator_site import Site, plain_file
from example_unit import BLOCK_HASH, CHECKPOINT_HASH, INDEX, VERSION, with_row
from world import COORDINATOR, OWNER, PUBLISHER

from intellect_protocol.assignment import prompt_slots, unit_seed
from intellect_protocol.errors import RefusedError
from intellect_protocol.keys import LocalSigner, PeerKey, receipt_digest, vouch_digest, work_digest
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.messages import GetVerdicts
from intellect_protocol.rollouts import RolloutUnit, write_unit
from intellect_protocol.validation.admission import (
    ExpectedEnvelope,
    check_envelope,
    check_work_signature,
)
from intellect_protocol.validation.findings import Check, Outcome
from intellect_protocol.wire import Envelope, sha256

THIEF = LocalSigner(b"\x77" * 32)


@pytest.fixture(scope="module")
def unit(arena: Arena) -> RolloutUnit:
    return arena.build()


# --- another node's work -----------------------------------------------------------------------------


def test_another_nodes_file_is_not_the_thiefs(arena: Arena, unit: RolloutUnit) -> None:
    """The thief signs the very bytes that somebody else submitted."""
    judgement = arena.judge(unit, node=THIEF)
    assert (judgement.outcome, codes(judgement)) == (Outcome.REJECTED, {"file_meta"})
    off = (Check.FILE, Check.ASSIGNMENT, Check.TOKENS, Check.REWARD, Check.SAMPLING)
    assert arena.judge(unit, *off, node=THIEF).outcome is Outcome.ACCEPTED


def test_a_copy_under_the_thiefs_name_has_the_wrong_prompts(arena: Arena, unit: RolloutUnit) -> None:
    copy = RolloutUnit(msgspec.structs.replace(unit.meta, node=THIEF.address_bytes), unit.rows)
    caught = {
        Check.ASSIGNMENT: "assignment",
        Check.TOKENS: "prompt_tokens",
        Check.SAMPLING: "sampling_distance",
    }
    off = {*caught, Check.REWARD}
    assert arena.judge(copy, *off, node=THIEF).outcome is Outcome.ACCEPTED
    for check, code in caught.items():
        judgement = arena.judge(copy, *(off - {check}), node=THIEF)
        assert judgement.fraud
        assert code in codes(judgement)


def test_a_copy_fails_by_its_streams_even_where_all_prompts_are_alike(arena: Arena) -> None:
    """Small tasks repeat, so a prompt in common proves nothing; the uniforms are the thief's own."""

    class OnePrompt:
        def prompt_tokens(self, slot: object) -> list[int]:
            return [5, 6, 7]

        def reward(self, slot: object, completion: object) -> float:
            return 0.5

        def answer(self, slot: object) -> list[int]:
            return [2]

    alike = Arena(arena.run, arena.folder, arena.engine, OnePrompt())
    own = alike.build(node=THIEF)
    stolen = alike.build()
    rows = [
        msgspec.structs.replace(mine, completion_tokens=theirs.completion_tokens, logprobs=theirs.logprobs,
                                finish_reason=theirs.finish_reason, proofs=theirs.proofs)
        for mine, theirs in zip(own.rows, stolen.rows, strict=True)
    ]  # fmt: skip
    copy = RolloutUnit(own.meta, rows)
    assert alike.judge(copy, Check.SAMPLING, node=THIEF).outcome is Outcome.ACCEPTED
    judgement = alike.judge(copy, node=THIEF)
    assert judgement.fraud
    assert {finding.check for finding in judgement.findings} == {Check.SAMPLING}


# --- which unit, which key ---------------------------------------------------------------------------


async def refused(site: Site, code: str, body: bytes, index: int, node: LocalSigner = SITE_NODE) -> None:
    with pytest.raises(RefusedError) as caught:
        await site.intake.submit(node.address, site.submission(body, index, node=node), body)
    assert caught.value.code == code


def test_the_best_of_many_units_is_valid_in_itself(arena: Arena) -> None:
    """With gaps allowed a node would make eight units and hand in the best; no check on the file minds."""
    units = [arena.build(index=index) for index in range(8)]
    rewards = [float(np.mean([row.reward for row in unit.rows])) for unit in units]
    best = max(range(1, 8), key=rewards.__getitem__)
    assert rewards[best] > np.mean(rewards)
    assert arena.judge(units[best], index=best).outcome is Outcome.ACCEPTED


async def test_an_index_after_a_gap_is_refused_at_the_door(site: Site) -> None:
    await refused(site, "index_gap", plain_file(site, 3), 3)
    for index in range(4):
        await site.submit(plain_file(site, index), index)


def favourable(arena: Arena, node: bytes) -> float:
    """Share of a node's prompts of a version that are of the kind a cheat likes."""
    seed = unit_seed(arena.run.run_id, VERSION, CHECKPOINT_HASH, BLOCK_HASH, node, INDEX)
    return float(np.mean([slot.target_length == 10 for slot in prompt_slots(seed, arena.run.terms)]))


def test_a_ground_key_would_choose_its_prompts(arena: Arena) -> None:
    """Sixty-four keys, known checkpoint and block: one of them has all prompts as it likes them."""
    keys = [LocalSigner(sha256(b"grind", bytes([number]))) for number in range(64)]
    best = max(keys, key=lambda key: favourable(arena, key.address_bytes))
    assert favourable(arena, best.address_bytes) == 1.0
    assert np.mean([favourable(arena, key.address_bytes) for key in keys]) < 0.75
    unit = arena.build(index=INDEX, node=best)
    assert arena.judge(unit, index=INDEX, node=best).outcome is Outcome.ACCEPTED


async def test_a_key_bound_after_the_checkpoint_was_recorded_is_refused_for_it(site: Site) -> None:
    ground = development_signer(11)
    await refused(site, "not_bound", b"x", 0, ground)
    await site.world.ledger.bind_node(OWNER, ground, PeerKey(b"\x06" * 32).peer_id)
    await site.standing.sync()
    await refused(site, "bound_late", b"x", 0, ground)


async def test_more_nodes_than_stake_do_not_work(site: Site) -> None:
    """The stake of two nodes under three keys: the sybil's third key may not work, whoever it says it is."""
    keys = [development_signer(number) for number in (11, 12)]
    for number, key in enumerate(keys):
        await site.world.ledger.bind_node(OWNER, key, PeerKey(bytes([6 + number]) * 32).peer_id)
    await site.world.ledger.record_checkpoint(PUBLISHER, site.config.run_id, 9, b"\x09" * 32)
    recorded = await site.heads.recorded(9)
    assert recorded is not None
    assert await site.standing.check(keys[0].address, recorded) == OWNER.address
    with pytest.raises(RefusedError, match="no_stake"):
        await site.standing.check(keys[1].address, recorded)


# --- replays -----------------------------------------------------------------------------------------


async def test_work_handed_in_twice_counts_once_and_other_work_is_a_conflict(site: Site) -> None:
    body = plain_file(site, 0)
    message = site.submission(body, 0)
    first = await site.intake.submit(SITE_NODE.address, message, body)
    assert await site.intake.submit(SITE_NODE.address, message, body) == first
    assert len((await site.intake.verdicts(SITE_NODE.address, GetVerdicts(cursor=0))).entries) == 1
    await refused(site, "conflicting_submission", plain_file(site, 0, token=6), 0)


async def test_work_signed_for_one_version_is_not_good_for_the_next(site: Site) -> None:
    site.heads.set(1)
    body = plain_file(site, 0)
    old = site.submission(body, 0)
    moved = msgspec.structs.replace(old, version=1, checkpoint_hash=site.checkpoints[1])
    with pytest.raises(RefusedError, match="bad_work_signature"):
        await site.intake.submit(SITE_NODE.address, moved, body)
    assert await site.intake.submit(SITE_NODE.address, old, body)


def test_work_of_a_unit_handed_in_as_another_is_refused(arena: Arena, unit: RolloutUnit) -> None:
    judgement = arena.judge(unit, index=1)
    assert (judgement.outcome, codes(judgement)) == (Outcome.REJECTED, {"file_meta"})
    moved = RolloutUnit(msgspec.structs.replace(unit.meta, index=1), unit.rows)
    assert arena.judge(moved, index=1).fraud
    off = (Check.ASSIGNMENT, Check.TOKENS, Check.REWARD, Check.SAMPLING)
    assert arena.judge(moved, *off, index=1).outcome is Outcome.ACCEPTED


def test_a_recorded_request_is_good_once_for_one_peer_and_one_type() -> None:
    envelope = Envelope(b"r" * 32, 1, b"coordinator", "Submit", b"c" * 32, 1_000_000, b"n" * 16)
    signed = msgspec.structs.replace(envelope, signature=THIEF.sign_digest(envelope.digest()))
    expected = ExpectedEnvelope(b"r" * 32, 1, b"coordinator", "Submit", b"c" * 32, 1_000_000, False)
    assert check_envelope(signed, expected) == []
    replays = {
        "replay": {"known_nonce": True},
        "wrong_audience": {"audience": b"another peer"},
        "wrong_type": {"message_type": "Abandon"},
        "wrong_content": {"content_hash": b"d" * 32},
        "wrong_run": {"run_id": b"s" * 32},
        "wrong_chain": {"chain_id": 2},
        "clock": {"now_ms": 1_000_000 + 121_000},
    }
    for code, changes in replays.items():
        assert [f.code for f in check_envelope(signed, msgspec.structs.replace(expected, **changes))] == [
            code
        ]


# --- signatures over bytes chosen by somebody else ------------------------------------------------------


FORGED_WORK: dict[str, Any] = {
    "run_id": b"r" * 32,
    "version": 7,
    "checkpoint_hash": b"c" * 32,
    "index": 0,
    "file_hash": b"f" * 32,
    "size_bytes": 1000,
}


def is_work_of(signature: bytes, signer: LocalSigner) -> bool:
    """Whether a signature makes `signer` the author of the forged work."""
    return not check_work_signature(**FORGED_WORK, signature=signature, node=signer.address_bytes)


def test_signing_what_a_peer_sends_would_sign_anything() -> None:
    """What the next tests rule out: a hash from a peer, signed as it is, signs anything."""
    assert is_work_of(COORDINATOR.sign_digest(work_digest(**FORGED_WORK)), COORDINATOR)


async def test_a_receipt_is_no_signature_over_the_hash_that_it_names(site: Site) -> None:
    """The file hash is the submitter's choice: here it is the digest that he wants signed."""
    wanted = work_digest(**FORGED_WORK)
    receipt = receipt_digest(b"r" * 32, 7, 0, THIEF.address_bytes, wanted, 1)
    assert not is_work_of(COORDINATOR.sign_digest(receipt), COORDINATOR)
    body = plain_file(site, 0)
    real = await site.intake.submit(SITE_NODE.address, site.submission(body, 0), body)
    assert real.is_signed_by(COORDINATOR.address)
    for chosen in (sha256(body), body[:32]):
        assert COORDINATOR.sign_digest(chosen) != real.signature


@pytest.mark.parametrize("field", ["run_id", "audience", "message_type", "content_hash", "nonce"])
def test_no_field_of_a_request_can_carry_the_digest_to_be_signed(field: str) -> None:
    wanted = work_digest(**FORGED_WORK)
    values = {"run_id": b"r" * 32, "audience": b"p", "message_type": "Hello", "content_hash": b"c" * 32,
              "nonce": b"n" * 16}  # fmt: skip
    values[field] = wanted.hex() if field == "message_type" else wanted
    envelope = Envelope(chain_id=1, issued_at_ms=1, **values)  # type: ignore[arg-type]
    assert envelope.digest() != wanted
    assert not is_work_of(THIEF.sign_digest(envelope.digest()), THIEF)


def test_vouching_for_a_peer_id_signs_nothing_that_the_peer_chose() -> None:
    wanted = work_digest(**FORGED_WORK)
    digest = vouch_digest(1, "0x" + "22" * 20, wanted)
    assert not is_work_of(THIEF.sign_digest(digest), THIEF)


def test_a_file_that_one_row_was_changed_in_is_not_the_signed_one(arena: Arena, unit: RolloutUnit) -> None:
    """A coordinator or a peer on the way cannot change what a node is judged by."""
    context = arena.context(write_unit(unit))
    changed = write_unit(with_row(unit, 0, reward=unit.rows[0].reward + 1))
    signed = check_work_signature(
        arena.run.run_id, VERSION, CHECKPOINT_HASH, 0, sha256(changed), len(changed),
        context.work_signature, context.node,
    )  # fmt: skip
    assert [finding.code for finding in signed] == ["bad_work_signature"]

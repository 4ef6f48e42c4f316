"""Jobs, leases and verdicts over a real database."""

from __future__ import annotations

import json

import msgspec
import pytest
from coordinator_site import (
    FRAUD,
    NODE,
    SUSPECT,
    Site,
    accept,
    acceptance,
    batch_of,
    plain_file,
    plain_unit,
    said,
)
from world import STRANGER, VALIDATORS

from intellect_coordinator import jobs, judgement
from intellect_coordinator.outcomes import take_outcomes
from intellect_protocol.errors import InvalidDataError, RefusedError
from intellect_protocol.messages import (
    GetVerdicts,
    JobHeartbeat,
    JobKind,
    JudgeVerdict,
    SubmissionState,
    TrainingState,
    WorkStatus,
)
from intellect_protocol.rollouts import Batch, read_batch
from intellect_protocol.wire import sha256
from intellect_protocol.work_file import judge_job_id

FIRST, SECOND, THIRD = VALIDATORS


async def status(site: Site, index: int = 0) -> WorkStatus:
    answer = await site.intake.verdicts(NODE.address, GetVerdicts(cursor=0))
    return next(entry for entry in answer.entries if entry.index == index)


async def test_a_job_goes_to_one_validator_and_its_id_names_unit_and_file(site: Site) -> None:
    file = plain_file(site, 0)
    await site.submit(file, 0)
    job = await site.claim(FIRST)
    assert job.judge is not None
    judge = job.judge
    assert job.job_id == judge_job_id(
        site.config.run_id, 0, NODE.address_bytes, 0, judge.file_hash, judge.attempt
    )
    assert (await site.claim(SECOND)).job_id == b""


async def test_an_accepted_unit_is_in_the_batch_store_and_credited(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await accept(site)
    path = site.batches.root / "v00000000" / f"{NODE.address_bytes.hex()}-000000.parquet"
    batch = read_batch(path.read_bytes(), site.desk.file_limits())
    assert batch.meta.validator == FIRST.address
    entry = await status(site)
    assert (entry.state, entry.training) == (SubmissionState.ACCEPTED, TrainingState.BATCHED)
    assert {"received", "queued", "accepted", "batched"} <= set(entry.times_ms)
    assert [state for _, state in site.told] == [SubmissionState.ACCEPTED]


async def test_the_same_verdict_again_is_taken_as_one(site: Site) -> None:
    file = plain_file(site, 0)
    await site.submit(file, 0)
    job = await site.claim(FIRST)
    verdict, body = acceptance(batch_of(site, plain_unit(site, 0), file, FIRST))
    signed = site.signed(FIRST, job.job_id, verdict)
    assert (await site.desk.verdict(FIRST.address, signed, body)).stored
    assert (await site.desk.verdict(FIRST.address, signed, body)).stored
    assert len(site.told) == 1


def other_rows(batch: Batch) -> Batch:
    rows = [msgspec.structs.replace(row, completion_tokens=[9, 1]) for row in batch.rows]
    return Batch(batch.meta, rows)


def fewer_rows(batch: Batch) -> Batch:
    return Batch(batch.meta, batch.rows[:1])


def other_node(batch: Batch) -> Batch:
    return Batch(msgspec.structs.replace(batch.meta, node=b"\x01" * 20), batch.rows)


def other_validator(batch: Batch) -> Batch:
    return Batch(msgspec.structs.replace(batch.meta, validator=SECOND.address), batch.rows)


@pytest.mark.parametrize("change", [other_rows, fewer_rows, other_node, other_validator])
async def test_a_batch_file_that_is_not_of_the_judged_file_never_reaches_the_trainer(
    site: Site, change: object
) -> None:
    file = plain_file(site, 0)
    await site.submit(file, 0)
    job = await site.claim(FIRST)
    batch = batch_of(site, plain_unit(site, 0), file, FIRST)
    verdict, body = acceptance(change(batch))  # type: ignore[operator]
    with pytest.raises(RefusedError, match="bad_batch"):
        await site.answer(FIRST, job.job_id, verdict, body)
    assert list(site.batches.root.glob("v*")) == []
    assert (await status(site)).state is SubmissionState.QUEUED


async def test_only_members_of_the_validator_set_are_heard(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    with pytest.raises(RefusedError, match="not_a_validator"):
        await site.claim(STRANGER)
    job = await site.claim(FIRST)
    with pytest.raises(RefusedError, match="not_a_validator"):
        await site.answer(STRANGER, job.job_id, said("rejected", FRAUD))


async def test_a_verdict_signed_by_somebody_else_is_refused(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    job = await site.claim(FIRST)
    signed = site.signed(SECOND, job.job_id, said("rejected", FRAUD))
    with pytest.raises(RefusedError, match="bad_signature"):
        await site.desk.verdict(FIRST.address, signed, b"")


@pytest.mark.parametrize(
    "verdict",
    [
        JudgeVerdict("accepted", True, [FRAUD], b"h" * 32, 1, 1, 0.0),
        JudgeVerdict("rejected", False, [], b"", 0, 0, 0.0),
        JudgeVerdict("rejected", True, [SUSPECT], b"", 0, 0, 0.0),
        JudgeVerdict("accepted", False, [], b"", 1, 1, 0.0),
        JudgeVerdict("suspect", False, [], b"", 0, 0, 0.0),
        JudgeVerdict("splendid", False, [], b"", 0, 0, 0.0),
    ],
)
async def test_a_verdict_that_contradicts_itself_changes_nothing(site: Site, verdict: JudgeVerdict) -> None:
    await site.submit(plain_file(site, 0), 0)
    job = await site.claim(FIRST)
    with pytest.raises(RefusedError, match="bad_verdict"):
        await site.answer(FIRST, job.job_id, verdict)
    assert (await status(site)).state is SubmissionState.QUEUED


async def test_a_lease_that_ran_out_goes_to_another_and_the_first_comes_too_late(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    job = await site.claim(FIRST)
    site.pass_time(31)
    await site.desk.sweep()
    again = await site.claim(SECOND)
    assert again.job_id == job.job_id
    with pytest.raises(RefusedError, match="lease_lost"):
        await site.answer(FIRST, job.job_id, said("rejected", FRAUD))
    with pytest.raises(RefusedError, match="lease_lost"):
        await site.desk.heartbeat(FIRST.address, JobHeartbeat(job.job_id))
    await site.answer(SECOND, again.job_id, said("rejected", FRAUD))
    assert (await status(site)).state is SubmissionState.REJECTED


async def test_a_heartbeat_keeps_the_lease(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    job = await site.claim(FIRST)
    for _ in range(4):
        site.pass_time(20)
        await site.desk.heartbeat(FIRST.address, JobHeartbeat(job.job_id))
        await site.desk.sweep()
        assert (await site.claim(SECOND)).job_id == b""


async def test_a_suspect_unit_is_reviewed_by_another_validator_who_decides(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await site.judge("suspect", SUSPECT, validator=FIRST)
    assert (await status(site)).state is SubmissionState.QUEUED
    assert (await site.claim(FIRST)).job_id == b""
    review = await site.claim(SECOND, JobKind.REVIEW)
    assert review.judge is not None
    assert review.judge.attempt == 1
    await site.answer(SECOND, review.job_id, said("rejected", FRAUD))
    entry = await status(site)
    assert entry.state is SubmissionState.REJECTED
    assert [note.code for note in entry.findings] == [SUSPECT.code, FRAUD.code]


async def test_two_suspicions_refuse_the_unit_and_accuse_nobody(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await site.judge("suspect", SUSPECT, validator=FIRST)
    await site.judge("suspect", SUSPECT, validator=SECOND)
    assert (await status(site)).state is SubmissionState.REJECTED
    await site.slashing.step()
    assert await site.world.ledger.cases() == []


async def test_our_own_failures_are_retried_a_bounded_number_of_times_and_blame_nobody(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    tries = 0
    while (await status(site)).state is SubmissionState.QUEUED:
        site.pass_time(60)
        await site.judge("inconclusive", validator=VALIDATORS[tries % 3])
        tries += 1
        assert tries <= judgement.MAX_ATTEMPTS
    entry = await status(site)
    assert tries == judgement.MAX_ATTEMPTS
    assert entry.state is SubmissionState.INCONCLUSIVE
    assert entry.findings == []


async def test_a_unit_whose_validators_all_vanish_ends_as_inconclusive(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    for _ in range(judgement.MAX_ATTEMPTS * judgement.MAX_LEASES):
        site.pass_time(60)
        assert (await site.claim(FIRST)).job_id
        site.pass_time(60)
        await site.desk.sweep()
    assert (await status(site)).state is SubmissionState.INCONCLUSIVE


async def test_leases_and_verdicts_outlive_a_restart(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await site.submit(plain_file(site, 1), 1)
    first = await site.claim(FIRST)
    await site.answer(FIRST, first.job_id, said("rejected", FRAUD))
    second = await site.claim(FIRST)
    await site.restart()
    assert (await status(site, 0)).state is SubmissionState.REJECTED
    assert (await site.claim(SECOND)).job_id == b""
    await site.answer(FIRST, second.job_id, said("rejected", FRAUD))
    assert (await status(site, 1)).state is SubmissionState.REJECTED


async def test_what_a_validator_could_not_judge_twice_is_offered_to_others_first(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await site.judge("inconclusive", validator=FIRST)
    site.pass_time(5)
    await site.judge("inconclusive", validator=FIRST)  # once more: it may have been a restart under way
    site.pass_time(5)
    assert (await site.claim(FIRST)).job_id == b""
    await site.judge("rejected", FRAUD, validator=SECOND)
    assert (await status(site)).state is SubmissionState.REJECTED


async def test_where_nobody_else_comes_the_same_validator_tries_again(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    for _ in range(2):
        await site.judge("inconclusive", validator=FIRST)
        site.pass_time(5)
    assert (await site.claim(FIRST)).job_id == b""
    site.pass_time(jobs.PREFER_OTHERS_MS // 1000)
    await accept(site, FIRST)
    assert (await status(site)).state is SubmissionState.ACCEPTED


async def test_a_review_that_failed_is_never_given_to_the_validator_who_was_suspicious(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    await site.judge("suspect", SUSPECT, validator=FIRST)
    await site.judge("inconclusive", validator=SECOND)
    site.pass_time(600)
    assert (await site.claim(FIRST)).job_id == b""
    review = await site.claim(THIRD, JobKind.REVIEW)
    await site.answer(THIRD, review.job_id, said("suspect", SUSPECT))
    assert (await status(site)).state is SubmissionState.REJECTED


async def test_a_validator_that_dies_with_every_lease_leaves_the_unit_to_others(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    for _ in range(judgement.MAX_LEASES):
        assert (await site.claim(FIRST)).judge is not None
        site.pass_time(31)
        await site.desk.sweep()
    site.pass_time(5)
    again = await site.claim(SECOND)
    assert again.judge is not None
    assert again.judge.attempt == 1
    entry = await status(site)
    assert (entry.state, entry.findings) == (SubmissionState.QUEUED, [])


async def test_the_trainers_outcomes_reach_the_node_once(site: Site) -> None:
    for index in range(2):
        await site.submit(plain_file(site, index), index)
        await accept(site)
    digests = [sha256(path.read_bytes()).hex() for path in sorted(site.batches.root.glob("v*/*.parquet"))]
    folder = site.batches.root / "outcomes"
    (folder / "00000001.json").write_text(json.dumps({digests[0]: "trained"}))
    (folder / "00000002.json").write_text(json.dumps({digests[1]: "filtered", "00" * 32: "expired"}))
    assert await take_outcomes(site.store, site.batches, site.now_ms) == 2
    assert (await status(site, 0)).training is TrainingState.TRAINED
    assert (await status(site, 1)).training is TrainingState.FILTERED
    await site.restart()
    assert await take_outcomes(site.store, site.batches, site.now_ms) == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"zz": "trained"}', '{"00": "sold"}', '{"00": 1}'])
async def test_a_malformed_outcome_is_an_error_and_the_ones_before_it_count(site: Site, text: str) -> None:
    await site.submit(plain_file(site, 0), 0)
    await accept(site)
    digest = sha256(next(site.batches.root.glob("v*/*.parquet")).read_bytes())
    folder = site.batches.root / "outcomes"
    (folder / "00000001.json").write_text(json.dumps({digest.hex(): "expired"}))
    (folder / "00000002.json").write_text(text)
    with pytest.raises(InvalidDataError):
        await take_outcomes(site.store, site.batches, site.now_ms)
    assert (await status(site)).training is TrainingState.EXPIRED

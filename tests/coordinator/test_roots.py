"""Work roots: what goes on the ledger, and what validators refuse to sign."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_site import FRAUD, NODE, Site, accept, plain_file
from example_unit import LocalScorer
from sqlalchemy import update
from world import STRANGER, VALIDATORS

from intellect_coordinator import schema
from intellect_coordinator.reviews import Reviewer
from intellect_coordinator.roots import closed_versions
from intellect_coordinator.validator_log import JudgedUnit, ShownReceipt, ValidatorLog
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import InvalidDataError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.merkle import leaf_hash, merkle_proof
from intellect_protocol.messages import Abandon, JobKind, Precommit, RootJob, RootVerdict
from intellect_protocol.wire import sha256
from intellect_protocol.work_file import (
    AbandonedUnit,
    UnjudgedUnit,
    WorkFile,
    read_work_file,
    write_work_file,
)

FIRST, SECOND, THIRD = VALIDATORS
MEMBERS = tuple(key.address for key in VALIDATORS)


async def work_for(site: Site, version: int) -> None:
    """Two accepted units, one refused, one abandoned."""
    for index in range(3):
        await site.submit(plain_file(site, index, version), index, version=version)
        if index == 1:
            await site.judge("rejected", FRAUD)
        else:
            await accept(site)
    await site.intake.abandon(NODE.address, Abandon(version, 3))


async def proposed(site: Site, *versions: int) -> bytes:
    """The hash of a work file over versions that have been closed."""
    for version in versions:
        site.heads.set(version)
        await work_for(site, version)
    site.heads.set(max(versions) + 3)
    digest = await site.roots.propose()
    assert digest is not None
    return digest


def content_of(site: Site, digest: bytes) -> bytes:
    content = site.blobs.get(digest, max_bytes=1 << 24)
    assert content is not None
    return content


async def sign(site: Site, reviewer: Reviewer, validator: LocalSigner) -> RootVerdict:
    """A validator claims its root job, checks the file and sends what it says."""
    job = await site.claim(validator, JobKind.ROOT)
    assert job.root is not None
    verdict = await reviewer.review_root(job.root, content_of(site, job.root.data_hash))
    await site.answer(validator, job.job_id, verdict)
    return verdict


async def test_closed_versions_go_on_the_ledger_together_once_a_quorum_signed(
    site: Site, engine: TorchEngine
) -> None:
    digest = await proposed(site, 0, 1)
    scorer = LocalScorer(engine)
    assert (await sign(site, site.reviewer(FIRST, scorer), FIRST)).signature
    await site.roots.commit_signed()
    assert (await site.world.ledger.work(site.config.run_id, 0)).committed_at == 0
    await site.restart()
    assert (await sign(site, site.reviewer(SECOND, scorer), SECOND)).signature
    await site.roots.commit_signed()
    for version in (0, 1):
        record = await site.world.ledger.work(site.config.run_id, version)
        assert (record.data_hash, record.accepted, record.rejected, record.units) == (digest, 2, 1, 4)
    assert (await site.claim(THIRD, JobKind.ROOT)).job_id == b""
    assert await site.roots.propose() is None


async def test_each_judged_unit_can_be_proved_against_the_ledger(site: Site, engine: TorchEngine) -> None:
    digest = await proposed(site, 0)
    for validator in (FIRST, SECOND):
        await sign(site, site.reviewer(validator, LocalScorer(engine)), validator)
    await site.roots.commit_signed()
    file = read_work_file(content_of(site, digest), site.config.run_id, MEMBERS)
    leaves = [judged.leaf for judged in file.versions[0].leaves]
    hashes = [leaf_hash(site.config.run_id, leaf) for leaf in leaves]
    assert [leaf.accepted for leaf in leaves] == [True, False, True]
    for position, leaf in enumerate(leaves):
        claim = (leaf.version, leaf.index, leaf.node, leaf.work_hash, leaf.accepted, leaf.units)
        proof = list(merkle_proof(hashes, position))
        assert await site.world.view("WorkLedger", "verifyWork", site.config.run_id, claim, proof)
        turned = (*claim[:4], not leaf.accepted, leaf.units)
        assert not await site.world.view("WorkLedger", "verifyWork", site.config.run_id, turned, proof)


async def test_a_kill_between_commit_and_database_is_made_good(site: Site, engine: TorchEngine) -> None:
    digest = await proposed(site, 0)
    for validator in (FIRST, SECOND):
        await sign(site, site.reviewer(validator, LocalScorer(engine)), validator)
    await site.roots.commit_signed()
    with site.store.transaction() as connection:
        connection.execute(update(schema.roots).values(state="proposed"))
    await site.restart()
    await site.roots.commit_signed()
    with site.store.snapshot() as connection:
        assert connection.scalars(schema.roots.select().with_only_columns(schema.roots.c.state)).all() == [
            "committed"
        ]
    assert (await site.world.ledger.work(site.config.run_id, 0)).data_hash == digest


async def test_a_version_is_closed_when_its_window_is_over_and_nothing_is_open(site: Site) -> None:
    def closed() -> list[int]:
        head = site.heads.head
        assert head is not None
        last = head.version - site.config.revision.window.async_level - 1
        with site.store.snapshot() as connection:
            return closed_versions(connection, last, site.now_ms)

    await site.submit(plain_file(site, 0), 0)
    late = plain_file(site, 1)
    message = site.submission(late, 1)
    await site.intake.precommit(NODE.address, Precommit(0, 1, message.file_hash, message.size_bytes))
    site.heads.set(2)
    assert closed() == []  # still in the window
    site.heads.set(3)
    assert closed() == []  # a verdict and an upload are due
    await accept(site)
    assert closed() == []  # an upload is due
    await site.intake.submit(NODE.address, message, late)
    assert closed() == []  # a verdict is due
    await accept(site)
    assert closed() == [0]


async def test_a_promised_upload_that_never_comes_holds_a_version_only_until_its_deadline(
    site: Site,
) -> None:
    await site.submit(plain_file(site, 0), 0)
    await accept(site)
    message = site.submission(b"never sent", 1)
    await site.intake.precommit(NODE.address, Precommit(0, 1, message.file_hash, message.size_bytes))
    site.heads.set(3)
    assert await site.roots.propose() is None
    site.pass_time(int(site.config.revision.window.precommit_ttl_s) + 1)
    assert await site.roots.propose() is not None


async def changed_file(site: Site, change: object) -> tuple[RootJob, bytes]:
    """A work file that the coordinator tampered with, and the job that goes with it."""
    digest = await proposed(site, 0)
    file = read_work_file(content_of(site, digest), site.config.run_id, MEMBERS)
    content = write_work_file(site.config.run_id, [change(file.versions[0])])  # type: ignore[operator]
    return RootJob(sha256(content), len(content), [0]), content


def invent_acceptance(work: object) -> object:
    leaves = list(work.leaves)  # type: ignore[attr-defined]
    leaf = msgspec.structs.replace(leaves[1].leaf, accepted=True, units=2)
    leaves[1] = msgspec.structs.replace(leaves[1], leaf=leaf)
    return msgspec.structs.replace(work, leaves=leaves)


def raise_credit(work: object) -> object:
    leaves = list(work.leaves)  # type: ignore[attr-defined]
    leaves[0] = msgspec.structs.replace(leaves[0], leaf=msgspec.structs.replace(leaves[0].leaf, units=99))
    return msgspec.structs.replace(work, leaves=leaves)


def move_to_another_node(work: object) -> object:
    leaves = list(work.leaves)  # type: ignore[attr-defined]
    leaf = msgspec.structs.replace(leaves[0].leaf, node=STRANGER.address)
    leaves[0] = msgspec.structs.replace(leaves[0], leaf=leaf)
    return msgspec.structs.replace(work, leaves=leaves)


def swap_order(work: object) -> object:
    return msgspec.structs.replace(work, leaves=list(reversed(work.leaves)))  # type: ignore[attr-defined]


def name_twice(work: object) -> object:
    return msgspec.structs.replace(work, abandoned=[AbandonedUnit(NODE.address, 0)])


def wrong_revision(work: object) -> object:
    return msgspec.structs.replace(work, revision=1)


@pytest.mark.parametrize(
    "change",
    [invent_acceptance, raise_credit, move_to_another_node, swap_order, name_twice, wrong_revision],
)
async def test_no_validator_signs_a_file_that_says_other_than_the_verdicts(
    site: Site, engine: TorchEngine, change: object
) -> None:
    job, content = await changed_file(site, change)
    verdict = await site.reviewer(THIRD, LocalScorer(engine)).review_root(job, content)
    assert verdict.signature == b""
    assert verdict.text


async def test_no_validator_signs_a_file_that_leaves_out_what_it_judged_or_was_shown(
    site: Site, engine: TorchEngine
) -> None:
    def without_last(work: object) -> object:
        return msgspec.structs.replace(work, leaves=work.leaves[:-1])  # type: ignore[attr-defined]

    job, content = await changed_file(site, without_last)
    scorer = LocalScorer(engine)
    # Nothing wrong with it for somebody who knows no better ...
    assert (await site.reviewer(THIRD, scorer).review_root(job, content)).signature
    last = site.submission(plain_file(site, 2), 2)
    # ... but the one who judged the unit, and the one who saw its receipt, do.
    judge_log = ValidatorLog(site.folder / f"{FIRST.address}.sqlite")
    judge_log.add_verdict(JudgedUnit(0, NODE.address, 2, last.file_hash, 0, "accepted"))
    shown_log = ValidatorLog(site.folder / f"{SECOND.address}.sqlite")
    assert shown_log.add_receipt(ShownReceipt(0, NODE.address, 2, last.file_hash))
    for log, validator in ((judge_log, FIRST), (shown_log, SECOND)):
        log.close()
        verdict = await site.reviewer(validator, scorer).review_root(job, content)
        assert verdict.signature == b""
        assert "2 of" in verdict.text


async def test_a_unit_that_nobody_could_judge_is_named_and_neither_credit_nor_blame(site: Site) -> None:
    await site.submit(plain_file(site, 0), 0)
    for _ in range(6):
        site.pass_time(60)
        await site.judge("inconclusive")
    site.heads.set(3)
    digest = await site.roots.propose()
    assert digest is not None
    (work,) = read_work_file(content_of(site, digest), site.config.run_id, MEMBERS).versions
    file_hash = site.submission(plain_file(site, 0), 0).file_hash
    assert work.leaves == []
    assert work.unjudged == [UnjudgedUnit(NODE.address, 0, file_hash)]
    assert work.names(NODE.address, 0, file_hash)


async def test_a_work_file_of_another_run_or_signed_by_strangers_is_refused(site: Site) -> None:
    content = content_of(site, await proposed(site, 0))
    read_work_file(content, site.config.run_id, MEMBERS)
    with pytest.raises(InvalidDataError):
        read_work_file(content, b"\0" * 32, MEMBERS)
    with pytest.raises(InvalidDataError, match="not signed by a validator"):
        read_work_file(content, site.config.run_id, (STRANGER.address,))
    with pytest.raises(InvalidDataError):
        read_work_file(content + b"\0", site.config.run_id, MEMBERS)
    with pytest.raises(InvalidDataError):
        read_work_file(content[:-1], site.config.run_id, MEMBERS)


async def test_reputation_follows_from_the_file_and_the_events_alone(site: Site) -> None:
    from world import OWNER

    from intellect_coordinator.standing import stored_events
    from intellect_protocol.reputation import compute_reputation

    digest = await proposed(site, 0, 1)
    file: WorkFile = read_work_file(content_of(site, digest), site.config.run_id, MEMBERS)
    with site.store.snapshot() as connection:
        events = stored_events(connection)
    record = compute_reputation(OWNER.address, events, [file])
    assert (record.accepted, record.rejected, record.abandoned) == (4, 2, 2)
    assert record.nodes == [NODE.address]
    assert record.stake == 1_000
    assert 0 < record.score < 100
    nobody = compute_reputation(STRANGER.address, events, [file])
    assert (nobody.accepted, nobody.rejected, nobody.score) == (0, 0, 0.0)

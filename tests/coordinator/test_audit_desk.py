"""The audit share from the door to the ledger: drawn at the receipt, judged, revealed, checked, signed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from coordinator_site import (
    FRAUD,
    NODE,
    Site,
    acceptance,
    batch_of,
    forged,
    generate,
    plain_file,
    plain_unit,
    said,
)
from example_unit import CountingTasks, LocalScorer
from intake_process import run_until
from sqlalchemy import select, update
from world import COORDINATOR, OWNER, PUBLISHER, VALIDATORS

from intellect_coordinator import schema
from intellect_coordinator.audit_desk import AuditDesk
from intellect_coordinator.explain import print_draws
from intellect_coordinator.judging import Judge
from intellect_coordinator.public_record import PublicRecord, published_draws
from intellect_coordinator.reviews import Reviewer
from intellect_coordinator.stake_book import StakeBook
from intellect_coordinator.validator import Validator, ValidatorOptions
from intellect_coordinator.validator_log import ValidatorLog
from intellect_protocol.engines.supervisor import EngineOptions
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import ConfigError, InvalidDataError, RefusedError, UnreachableError
from intellect_protocol.keys import PeerKey
from intellect_protocol.ledger.client import Ledger
from intellect_protocol.ledger.deployment import Deployment
from intellect_protocol.ledger.devkeys import development_signer
from intellect_protocol.ledger.events import Staked, StakeFrozen, StakeReleased, StakeSeized, UnbondRequested
from intellect_protocol.ledger.records import CourtTerms
from intellect_protocol.messages import JobKind, Precommit, RootJob, RootVerdict
from intellect_protocol.rollouts import RolloutUnit, read_batch, read_unit, write_unit
from intellect_protocol.run import AuditTerms
from intellect_protocol.validation.audit_share import SeedChain, draw, is_committed
from intellect_protocol.wire import sha256
from intellect_protocol.work_file import AuditReveal, VersionWork, WorkFile, read_work_file, write_work_file

FIRST, SECOND, THIRD = VALIDATORS
MEMBERS = tuple(key.address for key in VALIDATORS)
SECOND_NODE = development_signer(11)
# The world's stake of 1,000 and cap of 400 are in 10^-18 token.
SMALLEST = 1e-18
NEVER = {"probation_units": 0, "min_share": 0.0, "unit_value": SMALLEST * 1e-9, "safety": 1.0}
HALF = {**NEVER, "min_share": 0.5}
NEWCOMERS = {**NEVER, "probation_units": 2}


@pytest.fixture(scope="module")
def chain(populated_site: Path, model_folder: Path) -> SeedChain:
    site = Site(populated_site, model_folder)
    try:
        return SeedChain(COORDINATOR, site.config.run_id, 0)
    finally:
        site.close()


@pytest.fixture
def terms(chain: SeedChain) -> Callable[..., AuditTerms]:
    return lambda **values: AuditTerms(anchor=chain.anchor, **values)


@pytest.fixture
def open_site(
    populated_site: Path, tmp_path: Path, model_folder: Path, terms: Callable[..., AuditTerms]
) -> Callable[..., object]:
    """Opens a coordinator whose run has these audit terms."""

    @asynccontextmanager
    async def opened(**values: object) -> AsyncIterator[Site]:
        folder = tmp_path / "site"
        shutil.copytree(populated_site, folder)
        site = Site(folder, model_folder, terms(**values))
        try:
            await site.standing.open()
            await site.audits.open()
            yield site
        finally:
            site.close()

    return opened


def audits(site: Site) -> list[bool]:
    """Which units were drawn, in the order of their receipts."""
    with site.store.snapshot() as connection:
        table = schema.submissions
        return [bool(audit) for audit in connection.scalars(select(table.c.audit).order_by(table.c.id))]


async def accept(site: Site, *, audited: bool | None = None, validator=FIRST) -> bytes:
    """Claim the next plain submission and accept it, without a forward pass where the job needs none."""
    job = await site.claim(validator, JobKind.JUDGE)
    assert job.judge is not None
    file = site.blobs.get(job.judge.file_hash, max_bytes=1 << 20)
    assert file is not None
    batch = batch_of(site, read_unit(file, site.desk.file_limits()), file, validator)
    audited = job.judge.audit if audited is None else audited
    batch = msgspec.structs.replace(batch, meta=msgspec.structs.replace(batch.meta, audited=audited))
    verdict, body = acceptance(batch)
    if not audited:
        verdict = msgspec.structs.replace(verdict, audited=False)
    await site.answer(validator, job.job_id, verdict, body)
    return job.job_id


async def work_on(site: Site, version: int, units: int) -> None:
    """Units of a version, handed in and accepted."""
    site.heads.set(version)
    for index in range(units):
        await site.submit(plain_file(site, index, version), index, version=version)
        await accept(site)


async def proposed(site: Site, head: int) -> bytes:
    site.heads.set(head)
    digest = await site.roots.propose()
    assert digest is not None
    return digest


async def sign(site: Site, engine: TorchEngine, digest: bytes, *validators) -> list[RootVerdict]:
    """Validators check the work file and send what they say."""
    verdicts = []
    for validator in validators:
        job = await site.claim(validator, JobKind.ROOT)
        assert job.root is not None
        content = site.blobs.get(job.root.data_hash, max_bytes=1 << 24)
        assert content is not None
        reviewer: Reviewer = site.reviewer(validator, LocalScorer(engine))
        verdicts.append(await reviewer.review_root(job.root, content))
        await site.answer(validator, job.job_id, verdicts[-1])
    return verdicts


async def commit(site: Site, engine: TorchEngine, digest: bytes) -> None:
    for verdict in await sign(site, engine, digest, FIRST, SECOND):
        assert verdict.signature, verdict.text
    await site.roots.commit_signed()


def read(site: Site, digest: bytes) -> WorkFile:
    content = site.blobs.get(digest, max_bytes=1 << 24)
    assert content is not None
    return read_work_file(content, site.config.run_id, MEMBERS)


async def test_units_are_drawn_by_the_committed_seed_and_the_work_file_reveals_it(
    open_site, engine: TorchEngine, chain: SeedChain, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_site(**HALF) as site:
        await work_on(site, 0, 6)
        expected = [
            draw(
                site.config.run_id, chain.seed(0), 0, NODE.address_bytes, i, sha256(plain_file(site, i))
            ) < 0.5
            for i in range(6)
        ]  # fmt: skip
        assert audits(site) == expected
        assert len(set(expected)) == 2
        digest = await proposed(site, 3)
        (work,) = read(site, digest).versions
        assert isinstance(work.reveal, AuditReveal)
        assert is_committed(site.config.revision.audit, 0, work.reveal.seed)
        assert work.reveal.received_at_ms == sorted(set(work.reveal.received_at_ms))
        await commit(site, engine, digest)
        record = PublicRecord(site.config, site.world.ledger, site.published)
        (published,) = await record.published()
        report = await record.check(published)
        print_draws([report], as_json=False)
        assert "6 units" in capsys.readouterr().out
        assert (report.units, report.drawn, report.audited) == (6, sum(expected), sum(expected))
        assert report.problems == []


async def test_a_unit_that_is_not_drawn_passes_without_a_model_and_is_marked_for_the_trainer(
    open_site, engine: TorchEngine
) -> None:
    async with open_site(**NEVER) as site:
        unit = await generate(site, engine, 0)
        lies = [msgspec.structs.replace(row, logprobs=row.logprobs - np.float32(3)) for row in unit.rows]
        file = write_unit(RolloutUnit(unit.meta, lies))
        await site.submit(file, 0)
        job = await site.claim(FIRST, JobKind.JUDGE)
        assert job.judge is not None
        assert not job.judge.audit
        # There is no policy to fetch and no engine to start: nothing of the kind may be needed.
        judge = Judge(site.config, None, None)  # type: ignore[arg-type]
        judge._tasks = CountingTasks()
        verdict, body = await judge.verdict(file, await site.claims(file, 0, 0), FIRST.address, audit=False)
        assert (verdict.outcome, verdict.audited) == ("accepted", False)
        await site.answer(FIRST, job.job_id, verdict, body)
        (path,) = site.batches.root.glob("v*/*.parquet")
        batch = read_batch(path.read_bytes(), site.desk.file_limits())
        assert not batch.meta.audited
        digest = await proposed(site, 3)
        await commit(site, engine, digest)
        assert (await site.world.ledger.work(site.config.run_id, 0)).accepted == 1


async def test_without_a_forward_pass_the_checks_one_to_nine_still_refuse(
    open_site, engine: TorchEngine
) -> None:
    async with open_site(**NEVER) as site:
        file = write_unit(forged(await generate(site, engine, 0)))
        judge = Judge(site.config, None, None)  # type: ignore[arg-type]
        judge._tasks = CountingTasks()
        verdict, body = await judge.verdict(file, await site.claims(file, 0, 0), FIRST.address, audit=False)
        assert (verdict.outcome, verdict.fraud, body) == ("rejected", True, b"")
        assert {note.code for note in verdict.findings if note.kind == "fraud"} == {"reward"}


@pytest.mark.parametrize(("spot_checks", "audited"), [(0.0, False), (1.0, True)])
async def test_a_validator_may_audit_units_of_its_own_choice(
    open_site, spot_checks: float, audited: bool
) -> None:
    class Watched:
        """A judge that notes what it is asked for."""

        placed = None

        async def verdict(self, file, claims, validator, *, audit):
            asked.append(audit)
            return said("rejected", FRAUD), b""

    asked: list[bool] = []
    async with open_site(**NEVER) as site:
        file = plain_file(site, 0)
        await site.submit(file, 0)
        job = await site.claim(FIRST, JobKind.JUDGE)
        options = ValidatorOptions(
            run=site.config, signer=FIRST, data_dir=site.folder, listen=[], spot_checks=spot_checks,
            engine=EngineOptions(dtype="float32"),
        )  # fmt: skip
        swarm = SimpleNamespace(heads=site.heads, ledger=site.world.ledger)
        log = ValidatorLog(site.folder / "log.sqlite")
        validator = Validator(options, swarm, Watched(), log)  # type: ignore[arg-type]
        assert job.judge is not None
        assert await validator._answer(job, file) is not None
        log.close()
    assert asked == [audited]


async def test_no_verdict_leaves_out_the_audit_of_a_drawn_unit(open_site) -> None:
    async with open_site(**{**NEVER, "min_share": 1.0}) as site:
        await site.submit(plain_file(site, 0), 0)
        with pytest.raises(RefusedError, match="drawn for an audit"):
            await accept(site, audited=False)


async def test_a_batch_file_says_about_the_audit_what_the_verdict_says(open_site) -> None:
    async with open_site(**NEVER) as site:
        file = plain_file(site, 0)
        await site.submit(file, 0)
        job = await site.claim(FIRST, JobKind.JUDGE)
        verdict, body = acceptance(batch_of(site, plain_unit(site, 0), file, FIRST))
        with pytest.raises(RefusedError, match="differ about the audit"):
            await site.answer(FIRST, job.job_id, msgspec.structs.replace(verdict, audited=False), body)
        # A validator may always look closer than it has to.
        await site.answer(FIRST, job.job_id, verdict, body)


async def test_a_review_of_a_suspect_unit_is_always_an_audit(open_site) -> None:
    from coordinator_site import SUSPECT

    async with open_site(**NEVER) as site:
        await site.submit(plain_file(site, 0), 0)
        await site.judge("suspect", SUSPECT, validator=FIRST)
        review = await site.claim(SECOND, JobKind.REVIEW)
        assert review.judge is not None
        assert review.judge.audit
        rejection = msgspec.structs.replace(said("rejected", FRAUD), audited=False)
        with pytest.raises(RefusedError, match="drawn for an audit"):
            await site.answer(SECOND, review.job_id, rejection)


async def test_newcomers_are_audited_until_enough_of_their_work_is_on_the_ledger(
    open_site, engine: TorchEngine
) -> None:
    async with open_site(**NEWCOMERS) as site:
        await work_on(site, 0, 3)
        await work_on(site, 2, 1)
        digest = await proposed(site, 3)
        await site.submit(plain_file(site, 0, 3), 0, version=3)
        assert audits(site) == [True] * 5  # proposed is not yet published
        await commit(site, engine, digest)
        await site.submit(plain_file(site, 1, 3), 1, version=3)
        assert audits(site)[5:] == [False]
        await site.submit(plain_file(site, 1, 2), 1, version=2)
        assert audits(site)[6:] == [True]  # version 0 was still open when version 2 was new
        for _ in range(3):
            await accept(site)
        site.heads.set(6)
        await commit(site, engine, await proposed(site, 6))
        record = PublicRecord(site.config, site.world.ledger, site.published)
        assert [
            (report.version, report.units, report.drawn, report.problems)
            for report in [await record.check(work) for work in await record.published()]
        ] == [(0, 3, 3, []), (2, 2, 2, []), (3, 2, 0, [])]


async def test_an_owner_that_splits_its_work_over_nodes_is_audited_as_if_it_were_one(
    open_site, engine: TorchEngine
) -> None:
    # share = 3 k / (400 / 44.5): the owner's third unit of a version is drawn for certain.
    async with open_site(**{**NEVER, "unit_value": SMALLEST * 44.5}) as site:
        ledger = site.world.ledger
        await ledger.bind_node(OWNER, SECOND_NODE, PeerKey(b"\x06" * 32).peer_id)
        version = 9
        site.checkpoints[version] = b"\x09" * 32
        await ledger.record_checkpoint(PUBLISHER, site.config.run_id, version, site.checkpoints[version])
        site.heads.set(version)
        for node, index in ((NODE, 0), (SECOND_NODE, 0), (SECOND_NODE, 1), (NODE, 1)):
            unit = plain_unit(site, index, version)
            meta = msgspec.structs.replace(unit.meta, node=node.address_bytes)
            body = write_unit(RolloutUnit(meta, unit.rows))
            message = site.submission(body, index, version=version, node=node)
            await site.intake.submit(node.address, message, body)
        assert audits(site)[2:] == [True, True]
        for _ in range(4):
            await accept(site)
        digest = await proposed(site, 12)
        (work,) = read(site, digest).versions
        record = PublicRecord(site.config, ledger, site.published)
        facts = await record.owner_facts(version, [NODE.address, SECOND_NODE.address])
        assert {fact.owner for fact in facts.values()} == {OWNER.address}
        assert {fact.slashable for fact in facts.values()} == {400}
        report = await record.check(work)
        assert report.problems == []
        assert report.drawn == sum(audits(site))


async def spoiled(site: Site, change: Callable[[VersionWork], VersionWork]) -> tuple[RootJob, bytes]:
    """A work file that the coordinator changed before anybody saw it."""
    file = read(site, await proposed(site, 3))
    content = write_work_file(site.config.run_id, [change(file.versions[0])])
    return RootJob(sha256(content), len(content), [0]), content


def revealing(seed: bytes | None) -> Callable[[VersionWork], VersionWork]:
    def change(work: VersionWork) -> VersionWork:
        assert isinstance(work.reveal, AuditReveal)
        times = work.reveal.received_at_ms
        reveal = msgspec.UNSET if seed is None else AuditReveal(seed, times)
        return msgspec.structs.replace(work, reveal=reveal)

    return change


@pytest.mark.parametrize("which", ["none", "invented", "of another version"])
async def test_no_validator_signs_a_file_that_does_not_reveal_the_committed_seed(
    open_site, engine: TorchEngine, chain: SeedChain, which: str
) -> None:
    async with open_site(**HALF) as site:
        await work_on(site, 0, 2)
        seed = {"none": None, "invented": b"i" * 32, "of another version": chain.seed(1)}[which]
        job, content = await spoiled(site, revealing(seed))
        verdict = await site.reviewer(THIRD, LocalScorer(engine)).review_root(job, content)
        assert verdict.signature == b""
        assert "seed" in verdict.text


async def test_no_validator_signs_a_version_in_which_a_drawn_unit_was_not_audited(
    open_site, engine: TorchEngine
) -> None:
    async with open_site(**HALF) as site:
        for index in range(6):
            await site.submit(plain_file(site, index), index)
        assert True in audits(site)
        # The coordinator does a friend a favour and tells validators that nothing was drawn.
        with site.store.transaction() as connection:
            connection.execute(update(schema.submissions).values(audit=False))
        for _ in range(6):
            await accept(site)
        digest = await proposed(site, 3)
        for verdict in await sign(site, engine, digest, FIRST, SECOND, THIRD):
            assert verdict.signature == b""
            assert "drawn for an audit, and accepted without one" in verdict.text
        await site.roots.commit_signed()
        assert (await site.world.ledger.work(site.config.run_id, 0)).committed_at == 0


async def test_a_seed_is_revealed_only_when_nothing_can_be_added_to_its_version_or_one_before(
    open_site,
) -> None:
    async with open_site(**HALF) as site:
        await site.submit(plain_file(site, 0), 0)
        await work_on_pending(site, 1)
        site.heads.set(4)
        assert await site.roots.propose() is None  # version 1 is closed, version 0 waits for a verdict
        await accept(site)
        digest = await proposed(site, 4)
        assert [work.version for work in read(site, digest).versions] == [0, 1]
        # Even a coordinator that has forgotten how far the run is takes nothing more for them.
        site.heads.set(0)
        with pytest.raises(RefusedError, match="stale_version"):
            await site.submit(plain_file(site, 1), 1)
        message = site.submission(b"too late", 1)
        late = Precommit(0, 1, message.file_hash, message.size_bytes)
        with pytest.raises(RefusedError, match="stale_version"):
            await site.intake.precommit(NODE.address, late)


async def work_on_pending(site: Site, version: int) -> None:
    """A unit of a later version is accepted while one of version 0 still waits for its verdict."""
    site.heads.set(version)
    await site.submit(plain_file(site, 0, version), 0, version=version)
    first = await site.claim(FIRST, JobKind.JUDGE)
    await accept(site, validator=SECOND)
    # The first one's validator goes away.
    site.pass_time(60)
    await site.desk.sweep()
    assert first.judge is not None
    assert first.judge.version == 0


async def test_a_promised_upload_holds_back_the_seeds_of_later_versions_too(open_site) -> None:
    async with open_site(**HALF) as site:
        message = site.submission(b"on its way", 0)
        await site.intake.precommit(NODE.address, Precommit(0, 0, message.file_hash, message.size_bytes))
        await work_on(site, 1, 1)
        site.heads.set(4)
        assert await site.roots.propose() is None
        site.pass_time(int(site.config.revision.window.precommit_ttl_s) + 1)
        assert await site.roots.propose() is not None


async def test_kill_minus_nine_changes_no_draw_and_no_seed(
    open_site, terms, model_folder: Path, engine: TorchEngine, chain: SeedChain
) -> None:
    async with open_site(**HALF) as site:
        folder = site.folder
    run_until(folder, model_folder, 8, msgspec.json.encode(terms(**HALF)).decode())
    site = Site(folder, model_folder, terms(**HALF))
    try:
        await site.restart()
        with site.store.snapshot() as connection:
            rows = connection.execute(select(schema.submissions).order_by(schema.submissions.c.id)).all()
        assert len(rows) >= 8
        for row in rows:
            u = draw(
                site.config.run_id, chain.seed(row.version), row.version, row.node, row.unit_index,
                row.file_hash,
            )  # fmt: skip
            assert row.audit == (u < 0.5)
        assert site.audits.seed(0) == chain.seed(0)
    finally:
        site.close()


async def test_receipts_of_an_owner_are_in_order_whatever_the_clock_does(open_site) -> None:
    async with open_site(**HALF) as site:
        for index, back_ms in enumerate((0, 0, 5_000)):
            site.now_ms -= back_ms
            await site.submit(plain_file(site, index), index)
        with site.store.snapshot() as connection:
            table = schema.submissions
            times = connection.scalars(select(table.c.received_at_ms).order_by(table.c.id)).all()
        assert list(times) == sorted(set(times))


async def test_a_key_that_did_not_commit_to_the_runs_seeds_cannot_coordinate_it(open_site) -> None:
    async with open_site(**HALF) as site:
        stranger = AuditDesk(site.config, PUBLISHER, site.standing.book, site.world.ledger)
        with pytest.raises(ConfigError, match="anchor"):
            await stranger.open()


async def test_the_draws_of_all_published_versions_can_be_repeated_from_the_run_file_alone(
    open_site, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(**HALF) as site:
        for version in (0, 1):
            await work_on(site, version, 3)
        await commit(site, engine, await proposed(site, 4))

        @asynccontextmanager
        async def at_the_coordinator(config: object) -> AsyncIterator[object]:
            yield site.published

        class TheChain(Ledger):
            """The run file names URLs; the chain of this test is in this process."""

            def __init__(self, rpc: list[str], deployment: Deployment, state_dir: None) -> None:
                super().__init__(site.world.provider, deployment, state_dir)

        monkeypatch.setattr("intellect_coordinator.public_record.open_work_files", at_the_coordinator)
        monkeypatch.setattr("intellect_protocol.ledger.client.Ledger", TheChain)
        reports = await published_draws(site.config)
        assert [(report.version, report.units, report.problems) for report in reports] == [
            (0, 3, []),
            (1, 3, []),
        ]
        assert await published_draws(site.config, 1) == reports[1:]
        with pytest.raises(InvalidDataError, match="not on the ledger"):
            await published_draws(site.config, 2)


async def test_a_published_file_that_nobody_gives_is_an_error_and_not_a_blank_record(
    open_site, engine: TorchEngine
) -> None:
    async with open_site(**NEWCOMERS) as site:
        await work_on(site, 0, 2)
        await commit(site, engine, await proposed(site, 3))

        async def nobody(digest: bytes) -> None:
            return None

        record = PublicRecord(site.config, site.world.ledger, nobody)
        with pytest.raises(UnreachableError, match="nobody gives"):
            await record.owner_facts(3, [NODE.address])


def test_slashable_stake_is_what_cases_and_caps_leave_at_that_block() -> None:
    caps = CourtTerms(1, 1, 1, fraud_cap=400, equivocation_cap=100, account_cap=700, cap_period_s=1)

    def at(block: int) -> dict[str, object]:
        return {"block_number": block, "log_index": 0, "transaction_hash": b"", "owner": "o"}

    book = StakeBook()
    book.apply(
        [
            Staked(**at(10), amount=300),
            Staked(**at(20), amount=700),
            StakeFrozen(**at(30), amount=850),
            StakeReleased(**at(40), amount=850),
            StakeSeized(**at(40), amount=500, reporter="r", cut=0),
            UnbondRequested(**at(50), amount=450, release_at=0),
        ]
    )
    expected = {9: 0, 10: 300, 19: 300, 20: 400, 30: 150, 40: 200, 50: 50}
    assert {block: book.slashable("o", caps, block) for block in expected} == expected
    assert book.slashable("o", caps) == 50
    assert book.slashable("nobody", caps) == 0
    assert book.staked_since("o", 50) == 10

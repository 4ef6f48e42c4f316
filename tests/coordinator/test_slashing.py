"""From a forged unit to a seized stake, with real contracts and three validators who replay the evidence."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from coordinator_site import FRAUD, NODE, Site, forged, generate, said
from example_unit import LocalScorer
from sqlalchemy import select
from world import COORDINATOR, OWNER, VALIDATORS

from intellect_coordinator import schema
from intellect_coordinator.case_views import case_views
from intellect_coordinator.evidence import read_evidence, write_evidence
from intellect_protocol.engines.torch_engine import TorchEngine
from intellect_protocol.errors import InvalidDataError, SlashedError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.records import CaseStatus
from intellect_protocol.ledger.typed_data import decision_typed_data
from intellect_protocol.messages import CaseVerdict, GetVerdicts, JobKind
from intellect_protocol.rollouts import write_unit

FIRST, SECOND, THIRD = VALIDATORS
WINDOW_S, VOTING_S = 100, 100


async def accuse(site: Site, file: bytes, index: int = 0) -> None:
    """The file is handed in and a validator calls it fraud."""
    await site.submit(file, index)
    await site.judge("rejected", FRAUD)


async def vote(site: Site, validator: LocalSigner, engine: TorchEngine) -> CaseVerdict:
    """An honest validator fetches its case job, replays the evidence and sends its decision."""
    job = await site.claim(validator, JobKind.CASE)
    assert job.case is not None
    bundle = site.blobs.get(job.case.evidence_hash, max_bytes=1 << 26)
    assert bundle is not None
    verdict = await site.reviewer(validator, LocalScorer(engine)).review_case(job.case, bundle)
    await site.answer(validator, job.job_id, verdict)
    return verdict


async def lie(site: Site, validator: LocalSigner, uphold: bool) -> None:
    """A validator that signs without looking."""
    job = await site.claim(validator, JobKind.CASE)
    assert job.case is not None
    case = await site.world.ledger.case(job.case.case_id)
    ledger = site.config.terms.ledger
    typed = decision_typed_data(ledger.chain_id, ledger.contracts["SlashCourt"], case, uphold)
    await site.answer(
        validator, job.job_id, CaseVerdict(case.case_id, uphold, validator.sign_typed(typed), "")
    )


async def test_a_forged_unit_costs_its_owner_the_stake_though_one_validator_lies(
    site: Site, engine: TorchEngine
) -> None:
    await accuse(site, write_unit(forged(await generate(site, engine, 0))))
    await site.slashing.step()  # builds the evidence
    await site.slashing.step()  # opens the case
    (case,) = await site.world.ledger.cases()
    assert (case.accused, case.node, case.reporter) == (OWNER.address, NODE.address, COORDINATOR.address)
    before = (await site.world.ledger.account(OWNER.address)).total

    assert (await vote(site, FIRST, engine)).uphold
    await lie(site, SECOND, uphold=False)
    assert (await vote(site, THIRD, engine)).uphold
    await site.slashing.step()
    assert (await site.world.ledger.case(1)).status is CaseStatus.OPEN  # the accused may still appeal

    site.pass_time(WINDOW_S + 1)
    await site.slashing.step()
    decided = await site.world.ledger.case(1)
    assert decided.status is CaseStatus.UPHELD
    after = (await site.world.ledger.account(OWNER.address)).total
    assert before - after == decided.seized == 400

    await site.standing.sync()
    with pytest.raises(SlashedError):
        await site.submit(b"more work", 1)
    answer = await site.intake.verdicts(NODE.address, GetVerdicts(cursor=0))
    assert answer.entries[0].case_id == 1
    with site.store.snapshot() as connection:
        assert [view.status for view in case_views(connection)] == ["upheld"]
        texts = connection.scalars(select(schema.events.c.text)).all()
    assert any("slashed" in text and "0x" + NODE.address_bytes.hex() in text for text in texts)


async def test_two_of_three_are_enough_when_one_is_away_and_every_step_survives_a_kill(
    site: Site, engine: TorchEngine
) -> None:
    await accuse(site, write_unit(forged(await generate(site, engine, 0))))
    await site.restart()
    await site.slashing.step()
    await site.restart()
    await site.slashing.step()
    await site.restart()
    for validator in (FIRST, SECOND):
        assert (await vote(site, validator, engine)).uphold
        await site.restart()
    site.pass_time(WINDOW_S + 1)
    await site.slashing.step()
    assert [case.status for case in await site.world.ledger.cases()] == [CaseStatus.UPHELD]


async def test_a_kill_between_the_transaction_and_the_database_opens_no_second_case(
    site: Site, engine: TorchEngine
) -> None:
    await accuse(site, write_unit(forged(await generate(site, engine, 0))))
    await site.slashing.step()
    (row,) = site_cases(site)
    await site.world.ledger.open_case(
        COORDINATOR, OWNER.address, NODE.address, 2**96 - 1, 0, row.evidence_hash
    )
    await site.restart()
    await site.slashing.step()
    assert len(await site.world.ledger.cases()) == 1
    assert [row.state for row in site_cases(site)] == ["open"]


async def test_an_honest_unit_that_one_validator_calls_fraud_keeps_its_stake(
    site: Site, engine: TorchEngine
) -> None:
    await accuse(site, write_unit(await generate(site, engine, 0)))
    await site.slashing.step()
    await site.slashing.step()
    await lie(site, FIRST, uphold=True)
    before = (await site.world.ledger.account(OWNER.address)).total
    for validator in (SECOND, THIRD):
        assert not (await vote(site, validator, engine)).uphold
    await site.slashing.step()  # a dismissal needs no window
    assert (await site.world.ledger.case(1)).status is CaseStatus.DISMISSED
    account = await site.world.ledger.account(OWNER.address)
    assert (account.total, account.frozen) == (before, 0)


async def test_a_case_that_nobody_decides_expires(site: Site, engine: TorchEngine) -> None:
    await accuse(site, write_unit(forged(await generate(site, engine, 0))))
    await site.slashing.step()
    await site.slashing.step()
    assert (await vote(site, FIRST, engine)).uphold
    site.pass_time(WINDOW_S + VOTING_S + 1)
    await site.slashing.step()
    assert (await site.world.ledger.case(1)).status is CaseStatus.EXPIRED
    assert [row.state for row in site_cases(site)] == ["expired"]
    assert (await site.claim(SECOND, JobKind.CASE)).job_id == b""


async def test_after_an_appeal_everybody_is_asked_again_and_need_not_wait(
    site: Site, engine: TorchEngine
) -> None:
    await accuse(site, write_unit(forged(await generate(site, engine, 0))))
    await site.slashing.step()
    await site.slashing.step()
    for validator in VALIDATORS:
        await vote(site, validator, engine)
    await site.world.ledger.appeal(OWNER, 1, b"D" * 32)
    await site.slashing.step()
    assert (await site.world.ledger.case(1)).status is CaseStatus.APPEALED
    for validator in (FIRST, THIRD):
        assert (await vote(site, validator, engine)).uphold
    await site.slashing.step()
    assert (await site.world.ledger.case(1)).status is CaseStatus.UPHELD


async def test_an_owner_has_one_case_at_a_time_and_none_after_it_is_barred(
    site: Site, engine: TorchEngine
) -> None:
    for index in range(3):
        await accuse(site, write_unit(forged(await generate(site, engine, index))), index)
    for _ in range(3):
        await site.slashing.step()
    assert len(await site.world.ledger.cases()) == 1
    for validator in (FIRST, SECOND):
        await vote(site, validator, engine)
    site.pass_time(WINDOW_S + 1)
    for _ in range(3):
        await site.slashing.step()
    assert len(await site.world.ledger.cases()) == 1
    assert [row.state for row in site_cases(site)] == ["upheld", "recorded", "recorded"]


async def test_a_validator_that_cannot_judge_abstains_and_is_asked_again(
    site: Site, engine: TorchEngine
) -> None:
    class Dead(LocalScorer):
        async def score(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
            raise OSError("no engine")

    await accuse(site, write_unit(await generate(site, engine, 0)))
    await site.slashing.step()
    await site.slashing.step()
    job = await site.claim(FIRST, JobKind.CASE)
    assert job.case is not None
    bundle = site.blobs.get(job.case.evidence_hash, max_bytes=1 << 26)
    assert bundle is not None
    verdict = await site.reviewer(FIRST, Dead(engine)).review_case(job.case, bundle)
    assert verdict.signature == b""
    await site.answer(FIRST, job.job_id, verdict)
    assert (await site.claim(FIRST, JobKind.CASE)).job_id == b""
    site.pass_time(5)
    assert (await site.claim(FIRST, JobKind.CASE)).job_id == job.job_id


def site_cases(site: Site) -> list[object]:
    with site.store.snapshot() as connection:
        return list(connection.execute(select(schema.cases).order_by(schema.cases.c.id)).all())


async def bundle_of(site: Site, engine: TorchEngine) -> bytes:
    """The bundle of a case that is open on the ledger."""
    await accuse(site, write_unit(forged(await generate(site, engine, 0))))
    await site.slashing.step()
    await site.slashing.step()
    bundle = site.blobs.get(site_cases(site)[0].evidence_hash, max_bytes=1 << 26)  # type: ignore[attr-defined]
    assert bundle is not None
    return bundle


def another(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, int):
        return value + 1
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    return COORDINATOR.address


async def test_a_bundle_reads_back_and_any_changed_part_is_refused(site: Site, engine: TorchEngine) -> None:
    bundle = await bundle_of(site, engine)
    checked = read_evidence(bundle)
    assert write_evidence(checked.evidence) == bundle
    assert checked.evidence.owner == OWNER.address
    assert [note.code for note in checked.verdict.findings] == [FRAUD.code]
    # Block and owner are the ledger's to confirm; every other part is bound by a signature.
    for name in checked.evidence.__struct_fields__:
        value = getattr(checked.evidence, name)
        if name in ("block_number", "block_hash", "owner"):
            continue
        changed = msgspec.structs.replace(checked.evidence, **{name: another(value)})
        with pytest.raises(InvalidDataError):
            read_evidence(write_evidence(changed))


async def test_validators_believe_the_ledger_and_not_the_bundle(site: Site, engine: TorchEngine) -> None:
    """Another block hash, for one, would be another seed for the unit."""
    checked = read_evidence(await bundle_of(site, engine))
    case = await site.world.ledger.case(1)
    reviewer = site.reviewer(FIRST, LocalScorer(engine))
    for change in ({"block_hash": b"\x07" * 32}, {"version": 1}, {"node": b"\x07" * 20}):
        evil = msgspec.structs.replace(checked.evidence, **change)
        assert await reviewer._objection(case, dataclasses.replace(checked, evidence=evil)) is not None
    assert await reviewer._objection(case, checked) is None


async def test_a_verdict_without_fraud_cannot_be_made_into_evidence(site: Site, engine: TorchEngine) -> None:
    checked = read_evidence(await bundle_of(site, engine))
    from intellect_protocol.keys import verdict_digest
    from intellect_protocol.wire import encode
    from intellect_protocol.work_file import judge_job_id

    content = encode(said("inconclusive"))
    unit = checked.evidence
    job_id = judge_job_id(
        site.config.run_id, unit.version, unit.node, unit.index, unit.file_hash, unit.attempt
    )
    signature = FIRST.sign_digest(verdict_digest(site.config.run_id, job_id, content))
    changed = msgspec.structs.replace(unit, verdict=content, verdict_signature=signature)
    with pytest.raises(InvalidDataError, match="does not speak of fraud"):
        read_evidence(write_evidence(changed))

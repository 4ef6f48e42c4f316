"""Cases: freeze at once, decide by quorum, never by one key, never twice, always ending."""

from __future__ import annotations

import msgspec
from world import (
    COORDINATOR,
    DEPLOYER,
    EVIDENCE,
    OWNER,
    PARAMETERS,
    REPORTER,
    SINK,
    STAKE,
    STRANGER,
    VALIDATORS,
    World,
    peer_id,
    refused,
    refused_signatures,
)

from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.deployment import LedgerParameters, deploy
from intellect_protocol.ledger.records import CaseStatus, Offence
from intellect_protocol.ledger.typed_data import (
    decision_typed_data,
    order_signatures,
    set_change_typed_data,
    typed_digest,
)

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


async def test_opening_freezes_at_once_and_takes_the_bond(world: World) -> None:
    before = await world.ledger.token_balance(REPORTER.address)
    case = await world.open_case(amount=300)
    assert case.status is CaseStatus.OPEN
    assert case.status.ongoing
    assert (case.accused, case.reporter, case.amount) == (OWNER.address, REPORTER.address, 300)
    assert case.window_ends_at == case.opened_at + PARAMETERS.window_s
    assert case.decide_by == case.window_ends_at + PARAMETERS.voting_s
    assert (case.evidence_hash, case.defence_hash, case.set_id) == (EVIDENCE, bytes(32), 1)
    assert (await world.ledger.account(OWNER.address)).frozen == 300
    assert await world.ledger.token_balance(REPORTER.address) == before - PARAMETERS.bond


async def test_the_amount_is_capped_per_kind_of_offence(world: World) -> None:
    fraud = await world.open_case(amount=10**9)
    assert fraud.amount == PARAMETERS.fraud_cap
    equivocation = await world.open_case(amount=10**9, kind=Offence.EQUIVOCATION, evidence=b"F" * 32)
    assert equivocation.amount == PARAMETERS.equivocation_cap
    assert [case.case_id for case in await world.ledger.cases()] == [1, 2]
    assert await world.ledger.cases(accused=STRANGER.address) == []


async def test_a_case_without_amount_evidence_or_accused_is_refused(world: World) -> None:
    await refused("SlashCourtZeroAmount", world.open_case(amount=0))
    await refused("SlashCourtZeroHash", world.open_case(evidence=bytes(32)))
    await refused("SlashCourtInvalidAccused", world.open_case(accused="0x" + 40 * "0"))
    await refused("SlashCourtUnknownCase", world.ledger.case(1))


async def test_an_upheld_case_seizes_pays_a_tenth_to_the_reporter_and_the_rest_to_the_sink(
    world: World,
) -> None:
    before = await world.ledger.token_balance(REPORTER.address)
    case = await world.open_case(amount=400)
    world.now = case.window_ends_at + 1
    await world.decide(case, True)
    after = await world.ledger.case(case.case_id)
    assert (after.status, after.seized) == (CaseStatus.UPHELD, 400)
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.frozen) == (STAKE - 400, 0)
    assert await world.ledger.token_balance(SINK) == 360
    assert await world.ledger.token_balance(REPORTER.address) == before + 40
    assert await world.ledger.token_balance(world.address("SlashCourt")) == 0
    assert await world.ledger.token_balance(world.address("StakeLedger")) == account.total


async def test_unbonding_stake_is_seized_first(world: World) -> None:
    await world.ledger.request_unbond(OWNER, 300)
    case = await world.open_case(amount=400)
    world.now = case.window_ends_at + 1
    await world.decide(case, True)
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.unbonding) == (STAKE - 400, 0)


async def test_nothing_is_upheld_within_the_window_even_by_all_validators(world: World) -> None:
    case = await world.open_case()
    world.now = case.window_ends_at
    await refused("SlashCourtWindowOpen", world.decide(case, True, VALIDATORS))
    world.now += 1
    await world.decide(case, True, VALIDATORS)


async def test_after_an_appeal_the_quorum_may_decide_before_the_window_ends(world: World) -> None:
    case = await world.open_case()
    before_appeal = world.verdict(case, True)
    await world.ledger.appeal(OWNER, case.case_id, b"D" * 32)
    appealed = await world.ledger.case(case.case_id)
    assert (appealed.status, appealed.defence_hash) == (CaseStatus.APPEALED, b"D" * 32)
    # What was signed without knowing the defence no longer counts, whatever it says.
    await refused_signatures(world.ledger.decide(STRANGER, case.case_id, True, before_appeal))
    await world.decide(appealed, True)
    assert world.now < case.window_ends_at


async def test_only_the_accused_appeals_once_and_within_the_window(world: World) -> None:
    case = await world.open_case()
    await refused("SlashCourtNotAccused", world.ledger.appeal(STRANGER, case.case_id, b"D" * 32))
    await refused("SlashCourtZeroHash", world.call(OWNER, "SlashCourt", "appeal", case.case_id, bytes(32)))
    world.now = case.window_ends_at + 1
    await refused("SlashCourtWindowOver", world.ledger.appeal(OWNER, case.case_id, b"D" * 32))
    second = await world.open_case(evidence=b"F" * 32)
    world.now = second.window_ends_at
    await world.ledger.appeal(OWNER, second.case_id, b"D" * 32)
    await refused(
        "SlashCourtAlreadyAppealed", world.call(OWNER, "SlashCourt", "appeal", second.case_id, b"X" * 32)
    )


async def test_a_quorum_dismisses_at_any_time_and_the_bond_goes_to_the_accused(world: World) -> None:
    before = await world.ledger.token_balance(OWNER.address)
    case = await world.open_case()
    await world.decide(case, False)
    assert (await world.ledger.case(case.case_id)).status is CaseStatus.DISMISSED
    assert await world.ledger.token_balance(OWNER.address) == before + PARAMETERS.bond
    account = await world.ledger.account(OWNER.address)
    assert (account.active, account.frozen) == (STAKE, 0)
    assert not await world.ledger.is_barred(OWNER.address)


async def test_silence_dismisses_and_the_bond_goes_to_the_accused(world: World) -> None:
    before = await world.ledger.token_balance(OWNER.address)
    case = await world.open_case()
    world.now = case.decide_by
    await refused("SlashCourtVotingOpen", world.ledger.expire(STRANGER, case.case_id))
    world.now += 1
    await refused("SlashCourtVotingOver", world.decide(case, True, VALIDATORS))
    await refused("SlashCourtVotingOver", world.decide(case, False, VALIDATORS))
    await world.ledger.expire(STRANGER, case.case_id)
    assert (await world.ledger.case(case.case_id)).status is CaseStatus.EXPIRED
    assert await world.ledger.token_balance(OWNER.address) == before + PARAMETERS.bond
    assert (await world.ledger.account(OWNER.address)).frozen == 0


async def test_an_ended_case_cannot_be_decided_appealed_or_expired_again(world: World) -> None:
    case = await world.open_case()
    await world.ledger.appeal(OWNER, case.case_id, b"D" * 32)
    appealed = await world.ledger.case(case.case_id)
    verdict = world.verdict(appealed, True)
    await world.ledger.decide(STRANGER, case.case_id, True, verdict)
    await refused("SlashCourtCaseClosed", world.ledger.decide(STRANGER, case.case_id, True, verdict))
    await refused("SlashCourtCaseClosed", world.call(OWNER, "SlashCourt", "appeal", case.case_id, b"X" * 32))
    world.now = case.decide_by + 1
    await refused("SlashCourtCaseClosed", world.ledger.expire(STRANGER, case.case_id))


async def test_one_validator_alone_decides_nothing(world: World) -> None:
    case = await world.open_case()
    world.now = case.window_ends_at + 1
    for uphold in (True, False):
        await refused("ValidatorSetBelowThreshold", world.decide(case, uphold, VALIDATORS[:1]))
        await refused(
            "ValidatorSetSignersNotAscending", world.decide(case, uphold, [VALIDATORS[0], VALIDATORS[0]])
        )
        await refused(
            "ValidatorSetSignersNotAscending", world.decide(case, uphold, [VALIDATORS[1], VALIDATORS[0]])
        )
    assert (await world.ledger.account(OWNER.address)).active == STAKE


async def test_nobody_outside_the_set_makes_up_a_quorum(world: World) -> None:
    case = await world.open_case()
    world.now = case.window_ends_at + 1
    for outsider in (COORDINATOR, DEPLOYER, STRANGER):
        pair = sorted([VALIDATORS[0], outsider], key=lambda key: key.address_bytes)
        await refused("ValidatorSetNotAMember", world.decide(case, True, pair))


async def test_the_reporter_has_no_vote_and_the_threshold_stays(world: World) -> None:
    reporter = VALIDATORS[1]
    case = await world.open_case(reporter=reporter)
    world.now = case.window_ends_at + 1
    await refused("ValidatorSetExcludedSigner", world.decide(case, True, VALIDATORS[:2]))
    await refused("ValidatorSetExcludedSigner", world.decide(case, True, VALIDATORS))
    await refused("ValidatorSetBelowThreshold", world.decide(case, True, VALIDATORS[2:]))
    await world.decide(case, True, [VALIDATORS[0], VALIDATORS[2]])


async def test_a_verdict_is_good_for_its_case_and_its_outcome_only(world: World) -> None:
    first = await world.open_case()
    second = await world.open_case(evidence=b"F" * 32)
    world.now = second.window_ends_at + 1
    await refused_signatures(world.ledger.decide(STRANGER, second.case_id, True, world.verdict(first, True)))
    await refused_signatures(world.ledger.decide(STRANGER, first.case_id, True, world.verdict(first, False)))
    forged = msgspec.structs.replace(first, amount=first.amount + 1)
    await refused_signatures(world.ledger.decide(STRANGER, first.case_id, True, world.verdict(forged, True)))


async def test_a_verdict_is_good_for_its_chain_court_and_set_only(world: World) -> None:
    case = await world.open_case()
    world.now = case.window_ends_at + 1
    court = world.address("SlashCourt")
    for chain_id, address, judged in (
        (78, court, case),
        (77, world.address("WorkLedger"), case),
        (77, court, msgspec.structs.replace(case, set_id=2)),
    ):
        typed = decision_typed_data(chain_id, address, judged, True)
        signatures = [key.sign_typed(typed) for key in VALIDATORS[:2]]
        await refused_signatures(world.ledger.decide(STRANGER, case.case_id, True, signatures))


async def test_the_digest_python_signs_is_the_one_the_court_computes(world: World) -> None:
    case = await world.open_case()
    for uphold in (True, False):
        typed = decision_typed_data(77, world.address("SlashCourt"), case, uphold)
        assert typed_digest(typed) == await world.view("SlashCourt", "decisionDigest", case.case_id, uphold)


async def test_the_malleated_twin_of_a_signature_is_refused(world: World) -> None:
    case = await world.open_case()
    world.now = case.window_ends_at + 1
    first, second = world.verdict(case, True)
    s = ORDER - int.from_bytes(first[32:64], "big")
    twin = first[:32] + s.to_bytes(32, "big") + bytes([55 - first[64]])
    attempt = world.ledger.decide(STRANGER, case.case_id, True, [twin, second])
    await refused("ECDSAInvalidSignatureS", attempt)


async def test_cases_are_judged_by_the_set_in_force_at_their_opening(world: World) -> None:
    newcomers = sorted((LocalSigner.create() for _ in range(3)), key=lambda key: key.address_bytes)
    members = [key.address for key in newcomers]
    typed = set_change_typed_data(77, world.address("ValidatorSet"), 2, members)
    signatures = order_signatures(typed, [key.sign_typed(typed) for key in VALIDATORS])
    await world.ledger.appoint_validators(STRANGER, members, signatures)
    world.now += PARAMETERS.set_change_s - 10
    old = await world.open_case()
    world.now += 10
    assert (await world.ledger.validator_set()).set_id == 2
    new = await world.open_case(evidence=b"F" * 32)
    assert (old.set_id, new.set_id) == (1, 2)
    world.now = new.window_ends_at + 1
    await refused("ValidatorSetNotAMember", world.decide(new, True, VALIDATORS))
    await refused("ValidatorSetNotAMember", world.decide(old, True, newcomers))
    await world.decide(old, True, VALIDATORS)
    await world.decide(new, True, newcomers)


async def test_an_upheld_fraud_bars_the_owner_from_binding_nodes(world: World) -> None:
    case = await world.open_case()
    world.now = case.window_ends_at + 1
    await world.decide(case, True)
    assert await world.ledger.is_barred(OWNER.address)
    attempt = world.ledger.bind_node(OWNER, LocalSigner.create(), peer_id())
    await refused("NodeRegistryBarred", attempt)


async def test_an_upheld_equivocation_does_not_bar(world: World) -> None:
    case = await world.open_case(kind=Offence.EQUIVOCATION)
    world.now = case.window_ends_at + 1
    await world.decide(case, True)
    assert (await world.ledger.account(OWNER.address)).active == STAKE - PARAMETERS.equivocation_cap
    assert not await world.ledger.is_barred(OWNER.address)


async def test_cases_of_one_period_seize_no_more_than_the_cap_of_the_account(world: World) -> None:
    cases = [await world.open_case(evidence=bytes([number]) * 32) for number in (1, 2)]
    world.now = cases[-1].window_ends_at + 1
    for case in reversed(cases):
        await world.decide(case, True)
    seized = [(await world.ledger.case(case.case_id)).seized for case in cases]
    assert seized == [PARAMETERS.account_cap - 400, 400]
    assert (await world.ledger.account(OWNER.address)).active == STAKE - PARAMETERS.account_cap
    world.now += PARAMETERS.cap_period_s
    later = await world.open_case(evidence=b"L" * 32)
    world.now = later.window_ends_at + 1
    await world.decide(later, True)
    assert (await world.ledger.account(OWNER.address)).total == 0


async def test_accusing_oneself_shields_nothing(world: World) -> None:
    await world.ledger.mint_token(DEPLOYER, OWNER.address, 1000)
    await world.ledger.request_unbond(OWNER, STAKE)
    sham = [await world.open_case(reporter=OWNER, evidence=bytes([n]) * 32) for n in (1, 2, 3)]
    real = await world.open_case(amount=400)
    assert (await world.ledger.account(OWNER.address)).frozen == 1600
    world.now = real.window_ends_at + 1
    await world.decide(real, True)
    assert (await world.ledger.case(real.case_id)).seized == 400
    world.now = real.decide_by + 1
    for case in sham:
        await world.ledger.expire(STRANGER, case.case_id)
    assert (await world.ledger.account(OWNER.address)).frozen == 0


async def test_a_verdict_never_fails_for_want_of_stake(world: World) -> None:
    case = await world.open_case(accused=STRANGER.address)
    world.now = case.window_ends_at + 1
    await world.decide(case, True)
    after = await world.ledger.case(case.case_id)
    assert (after.status, after.seized) == (CaseStatus.UPHELD, 0)
    assert await world.ledger.is_barred(STRANGER.address)


async def test_a_case_is_over_before_stake_can_be_out(world: World) -> None:
    assert PARAMETERS.window_s + PARAMETERS.voting_s < PARAMETERS.unbonding_s
    too_long = msgspec.structs.replace(PARAMETERS, voting_s=200)
    await refused("SlashCourtCaseOutlastsUnbonding", deploy(world.queue, DEPLOYER, too_long))
    too_soon = msgspec.structs.replace(PARAMETERS, set_change_s=200)
    await refused("SlashCourtCaseOutlastsSetChange", deploy(world.queue, DEPLOYER, too_soon))


async def test_senseless_parameters_cannot_be_deployed(world: World) -> None:
    for change in (
        {"window_s": 0},
        {"voting_s": 0},
        {"fraud_cap": 0},
        {"equivocation_cap": 0},
        {"account_cap": 0},
        {"cap_period_s": 0},
        {"fraud_cap": 1 << 96},
    ):
        parameters: LedgerParameters = msgspec.structs.replace(PARAMETERS, **change)
        await refused("SlashCourtInvalidParameters", deploy(world.queue, DEPLOYER, parameters))


async def test_a_court_serves_only_the_stake_ledger_that_names_it(world: World) -> None:
    arguments = (world.address("StakeLedger"), world.address("ValidatorSet"), (100, 100, 50, 1, 1, 1, 1))
    await refused("SlashCourtNotTheCourtOf", world.queue.create(DEPLOYER, "SlashCourt", *arguments))

"""Whatever stakers, reporters and validators do in whatever order, the books balance.

The handlers are guided: each usually waits until what it tries is possible, and the counters at the end
show that every kind of success really happened. Purely random ones never withdrew under a freeze.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable

import pytest
from world import DEPLOYER, OWNER, PARAMETERS, REPORTER, SINK, STAKE, STRANGER, VALIDATORS, World

from intellect_protocol.errors import LedgerError
from intellect_protocol.keys import LocalSigner
from intellect_protocol.ledger.records import Case, Offence

STAKERS = (OWNER, STRANGER)
# Refusals that the steps below may run into; anything else is a bug.
EXPECTED = {
    "StakeLedgerStillUnbonding",
    "StakeLedgerNothingToWithdraw",
    "StakeLedgerFrozen",
    "StakeLedgerInsufficientStake",
    "SlashCourtWindowOpen",
    "SlashCourtWindowOver",
    "SlashCourtVotingOver",
    "SlashCourtVotingOpen",
    "SlashCourtAlreadyAppealed",
}
SUCCESSES = (
    "stake",
    "unbond",
    "withdraw",
    "withdraw_under_freeze",
    "accuse",
    "appeal",
    "uphold",
    "dismiss",
    "expire",
)


class Crowd:
    """Takes random steps and keeps its own books."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.ledger = world.ledger
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.staked = {OWNER.address: STAKE, STRANGER.address: 0}
        self.withdrawn = 0
        self.evidence = 0

    async def step(self) -> None:
        key = self.random.choice(STAKERS)
        cases = await self.ledger.cases(ongoing=True)
        case = self.random.choice(cases) if cases else None
        await self._attempt(self._wait())
        match self.random.choice(("stake", "unbond", "withdraw", "accuse", "appeal", "judge", "expire")):
            case "stake":
                await self._attempt(self._stake(key))
            case "unbond":
                await self._attempt(self._unbond(key))
            case "withdraw":
                await self._attempt(self._withdraw(key))
            case "accuse" if len(cases) < 3:
                await self._attempt(self._accuse(key))
            case "appeal" if case is not None:
                await self._attempt(self._appeal(case))
            case "judge" if case is not None:
                await self._attempt(self._judge(case))
            case "expire" if case is not None:
                await self._attempt(self._expire(case))

    async def _attempt(self, action: Awaitable[None]) -> None:
        try:
            await action
        except LedgerError as error:
            if error.name not in EXPECTED:
                raise
            self.done[error.name] += 1

    def _patient(self) -> bool:
        return self.random.random() < 0.7

    async def _wait(self) -> None:
        self.world.now += self.random.choice((0, 1, 40))

    async def _stake(self, key: LocalSigner) -> None:
        amount = self.random.randint(1, 800)
        await self.ledger.stake(key, amount)
        self.staked[key.address] += amount
        self.done["stake"] += 1

    async def _unbond(self, key: LocalSigner) -> None:
        await self.ledger.request_unbond(key, self.random.randint(1, 800))
        self.done["unbond"] += 1

    async def _withdraw(self, key: LocalSigner) -> None:
        before = await self.ledger.account(key.address)
        if self._patient():
            self.world.now = max(self.world.now, before.release_at)
        await self.ledger.withdraw(key)
        after = await self.ledger.account(key.address)
        assert self.world.now >= before.release_at
        assert after.total >= min(after.frozen, before.total)
        self.withdrawn += before.total - after.total
        self.done["withdraw"] += 1
        self.done["withdraw_under_freeze"] += after.frozen > 0

    async def _accuse(self, key: LocalSigner) -> None:
        self.evidence += 1
        await self.world.open_case(
            accused=key.address,
            amount=self.random.randint(1, 800),
            kind=self.random.choice(list(Offence)),
            evidence=self.evidence.to_bytes(32, "big"),
        )
        self.done["accuse"] += 1

    async def _appeal(self, case: Case) -> None:
        accused = next(key for key in STAKERS if key.address == case.accused)
        await self.ledger.appeal(accused, case.case_id, b"D" * 32)
        self.done["appeal"] += 1

    async def _judge(self, case: Case) -> None:
        uphold = self.random.random() < 0.6
        if self._patient():
            self.world.now = max(self.world.now, case.window_ends_at + 1)
        await self.world.decide(case, uphold, VALIDATORS)
        self.done["uphold" if uphold else "dismiss"] += 1

    async def _expire(self, case: Case) -> None:
        if self.random.random() < 0.4:
            self.world.now = max(self.world.now, case.decide_by + 1)
        await self.ledger.expire(STRANGER, case.case_id)
        self.done["expire"] += 1

    async def check(self) -> None:
        """The books balance."""
        accounts = {key.address: await self.ledger.account(key.address) for key in STAKERS}
        cases = await self.ledger.cases()
        held = await self.ledger.token_balance(self.world.address("StakeLedger"))
        assert held == sum(account.total for account in accounts.values())
        for address, account in accounts.items():
            at_risk = [case.amount for case in cases if case.status.ongoing and case.accused == address]
            assert account.frozen == sum(at_risk)
        seized = sum(case.seized for case in cases)
        assert sum(self.staked.values()) == held + self.withdrawn + seized
        bonds = sum(case.bond for case in cases if case.status.ongoing)
        assert await self.ledger.token_balance(self.world.address("SlashCourt")) == bonds
        cuts = sum(case.seized * PARAMETERS.reporter_cut_bps // 10_000 for case in cases)
        assert await self.ledger.token_balance(SINK) == seized - cuts
        taken: Counter[tuple[str, int]] = Counter()
        for case in cases:
            taken[case.accused, case.opened_at // PARAMETERS.cap_period_s] += case.seized
        assert all(amount <= PARAMETERS.account_cap for amount in taken.values())


async def _run(world: World, seed: int, steps: int) -> None:
    await world.ledger.mint_token(DEPLOYER, REPORTER.address, 10**6)
    for key in STAKERS:
        await world.ledger.mint_token(DEPLOYER, key.address, 10**6)
    crowd = Crowd(world, seed)
    for _ in range(steps):
        await crowd.step()
        await crowd.check()
    missing = [name for name in SUCCESSES if crowd.done[name] == 0]
    assert not missing, crowd.done


async def test_the_books_balance_whatever_happens(world: World) -> None:
    await _run(world, seed=1, steps=100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
async def test_the_books_balance_over_long_runs(world: World, seed: int) -> None:
    await _run(world, seed=seed, steps=1_000)

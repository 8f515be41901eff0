"""The amount taken is the sum of the claims, for any order of changes."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from overwinter.scheduler.ledger import Ledger, LedgerError, Resource

OWNERS = st.tuples(st.sampled_from(["worker", "run"]), st.integers(1, 4))
TENANTS = st.sampled_from(["ada", "bob", None])
AMOUNTS = st.integers(0, 5)


class AnyClaims(RuleBasedStateMachine):
    """Random claims, compared with a plain table of them."""

    def __init__(self):
        super().__init__()
        self.resources = [Resource("workers", 3), Resource("memory"), Resource("cores", 4, alone=True)]
        self.ledger = Ledger(self.resources)
        self.claims = {}
        self.tenants = {}
        self.draining = set()

    @rule(owner=OWNERS, tenant=TENANTS, amounts=st.lists(AMOUNTS, max_size=3))
    def take(self, owner, tenant, amounts):
        claim = dict(zip(self.resources, amounts, strict=False))
        if owner in self.claims:
            with pytest.raises(LedgerError, match=f"{owner[0]} {owner[1]} has a claim"):
                self.ledger.take(owner, tenant, claim)
        else:
            self.ledger.take(owner, tenant, claim)
            self.claims[owner], self.tenants[owner] = claim, tenant

    @rule(owner=OWNERS, at=st.integers(0, 2), amount=AMOUNTS)
    def change(self, owner, at, amount):
        if self.is_known(owner, lambda: self.ledger.change(owner, self.resources[at], amount)):
            self.claims[owner] = {**self.claims[owner], self.resources[at]: amount}

    @rule(owner=OWNERS)
    def release(self, owner):
        if self.is_known(owner, lambda: self.ledger.release(owner)):
            del self.claims[owner]
            self.draining.discard(owner)

    @rule(owner=OWNERS)
    def drain(self, owner):
        if self.is_known(owner, lambda: self.ledger.drain(owner)):
            self.draining.add(owner)

    @rule(owner=OWNERS, at=st.integers(0, 2), less=st.integers(-5, -1))
    def take_less_than_nothing(self, owner, at, less):
        claim = {self.resources[0]: 1, self.resources[at]: less}
        known = owner in self.claims
        with pytest.raises(LedgerError, match=f"{owner[0]} {owner[1]} cannot"):
            self.ledger.change(owner, self.resources[at], less) if known else self.ledger.take(owner, "ada", claim)

    def is_known(self, owner, act) -> bool:
        if owner in self.claims:
            act()
            return True
        with pytest.raises(LedgerError, match=f"{owner[0]} {owner[1]} has no claim"):
            act()
        return False

    @invariant()
    def what_is_taken_is_the_sum_of_the_claims(self):
        self.ledger.check()
        assert (
            {owner for owner in self.claims if self.ledger.has(owner)} == set(self.claims) == set(self.ledger.claims())
        )
        for resource in self.resources:
            amounts = {owner: claim.get(resource, 0) for owner, claim in self.claims.items()}
            assert resource.taken == sum(amounts.values())
            for tenant in ("ada", "bob"):
                own = {owner: amount for owner, amount in amounts.items() if self.tenants[owner] == tenant}
                assert resource.of(tenant) == sum(own.values())
                assert resource.staying(tenant) == sum(own[owner] for owner in own.keys() - self.draining)

    @invariant()
    def what_fits_is_what_is_free(self):
        workers, memory, cores = self.resources
        assert memory.fits(10**9)
        assert (memory.free, memory.short(10**9)) == (inf, 0)
        for amount in range(7):
            assert workers.fits(amount) == (workers.taken + amount <= 3)
            assert workers.short(amount) == max(0, workers.taken + amount - 3)
            assert cores.fits(amount) == (cores.taken + amount <= 4 or cores.taken == 0)
            assert (cores.short(amount) == 0) == cores.fits(amount)
            assert workers.fits(amount, taken=2) == (amount <= 1)


TestAnyClaims = AnyClaims.TestCase
TestAnyClaims.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("spoil", ["taken", "_shares", "_draining"])
def test_a_wrong_sum_is_found(spoil):
    memory = Resource("memory", 10)
    ledger = Ledger([memory])
    ledger.take(("worker", 1), "ada", {memory: 3})
    ledger.drain(("worker", 1))
    ledger.check()
    setattr(memory, spoil, 4 if spoil == "taken" else {"ada": 4})
    with pytest.raises(AssertionError, match="memory"):
        ledger.check()


def test_a_claim_on_a_resource_of_another_ledger_is_found():
    ledger = Ledger([Resource("memory")])
    ledger.take(("worker", 1), "ada", {Resource("memory"): 3})
    with pytest.raises(AssertionError, match="another ledger"):
        ledger.check()

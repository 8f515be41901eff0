"""The ledger: which resources are taken, and by which owner.

A **resource** is anything scarce: workers, private memory, cores, bytes of the host stores. A **claim** is what one
owner (a worker, a run, a host store, a request) takes of the resources, from its start to its end. The **ledger** is
the table of all claims, by owner. The amount taken of a resource is the sum of the claims on it, and a tenant's share
is the sum of its own claims. Both sums are updated when claims change, so that reading one takes constant time.

The ledger records and does not decide: the caller has checked `fits` before it takes, or has a reason not to. More than
the capacity may also be taken when a capacity shrinks, or when a claim turns out larger than expected.
"""

from collections.abc import Hashable, Iterable, Mapping
from math import inf

import msgspec

from overwinter.core.ids import TenantId

Owner = tuple[Hashable, ...]
"""The kind of the owner, and its id within the kind."""


class LedgerError(Exception):
    """A duplicate, missing or negative claim."""


class Resource:
    """A scarce resource in whole units: workers, bytes, cores."""

    __slots__ = ("_draining", "_shares", "alone", "capacity", "draining", "name", "taken")

    def __init__(self, name: str, capacity: int | None = None, alone: bool = False) -> None:
        """Create a resource. `capacity` None: unlimited. `alone`: a single owner may take more than the capacity."""
        self.name = name
        self.capacity = capacity
        self.alone = alone
        self.taken = 0
        """The sum of all claims on it. Only the ledger changes it."""
        self.draining = 0
        """The part of `taken` that is draining."""
        self._shares: dict[TenantId, int] = {}
        self._draining: dict[TenantId, int] = {}

    def fits(self, amount: int, taken: int | None = None) -> bool:
        """Whether this much more fits. `taken`: the amount to assume as taken, in place of the present one."""
        present = self.taken if taken is None else taken
        return self.capacity is None or present + amount <= self.capacity or (self.alone and not present)

    def short(self, amount: int) -> int:
        """Return the amount that must be freed before this much more fits; not for a resource with `alone`."""
        return 0 if self.capacity is None or self.fits(amount) else self.taken + amount - self.capacity

    @property
    def free(self) -> float:
        """The free amount; inf without a bound."""
        return inf if self.capacity is None else max(0, self.capacity - self.taken)

    def of(self, tenant: TenantId) -> int:
        """The amount that a tenant has taken."""
        return self._shares.get(tenant, 0)

    def staying(self, tenant: TenantId) -> int:
        """The amount that a tenant has taken, without what is draining."""
        return self._shares.get(tenant, 0) - self._draining.get(tenant, 0)

    def _add(self, entry: "Entry", amount: int) -> None:
        self.taken += amount
        if entry.draining:
            self._drain(entry, amount)
        if entry.tenant is not None:
            _count(self._shares, entry.tenant, amount)

    def _drain(self, entry: "Entry", amount: int) -> None:
        self.draining += amount
        if entry.tenant is not None:
            _count(self._draining, entry.tenant, amount)


Claim = Mapping[Resource, int]
"""The amount of each resource."""


class Entry(msgspec.Struct, eq=False):
    """One line of the ledger."""

    tenant: TenantId | None
    """The tenant whose share the claim counts for; None: no tenant."""
    claim: Claim
    draining: bool = False
    """Whether the claim will be released soon, because its owner stops or drains with a time limit."""


class Ledger:
    """The table of all claims on these resources. An operation that raises LedgerError changes nothing."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self.resources = tuple(resources)
        self._entries: dict[Owner, Entry] = {}

    def take(self, owner: Owner, tenant: TenantId | None, claim: Claim) -> None:
        """Add the claim of an owner without one; `tenant`: the tenant whose share it counts for."""
        if owner in self._entries:
            raise LedgerError(f"{_named(owner)} has a claim already")
        for resource, amount in claim.items():
            if amount < 0:
                raise LedgerError(f"{_named(owner)} cannot claim a negative amount of {resource.name}")
        self._entries[owner] = Entry(tenant, claim)
        for resource, amount in claim.items():
            resource.taken += amount
            if tenant is not None:
                _count(resource._shares, tenant, amount)

    def change(self, owner: Owner, resource: Resource, amount: int) -> None:
        """Set the amount of a resource that the owner claims."""
        entry = self._entry(owner)
        if amount < 0:
            raise LedgerError(f"{_named(owner)} cannot claim a negative amount of {resource.name}")
        before = entry.claim.get(resource, 0)
        if amount != before:
            entry.claim = {**entry.claim, resource: amount}
            resource._add(entry, amount - before)

    def release(self, owner: Owner) -> None:
        """Remove the owner and its claim."""
        entry = self._entries.pop(owner, None)
        if entry is None:
            raise LedgerError(f"{_named(owner)} has no claim")
        for resource, amount in entry.claim.items():
            resource.taken -= amount
            if entry.draining:
                resource._drain(entry, -amount)
            if entry.tenant is not None:
                _count(resource._shares, entry.tenant, -amount)

    def drain(self, owner: Owner) -> None:
        """Mark the owner's claim as draining, so that `staying` excludes it."""
        entry = self._entry(owner)
        if entry.draining:
            return
        entry.draining = True
        for resource, amount in entry.claim.items():
            resource._drain(entry, amount)

    def has(self, owner: Owner) -> bool:
        """Whether the owner has a claim."""
        return owner in self._entries

    def claims(self) -> dict[Owner, Claim]:
        """Return a copy of all claims, for tests and debugging."""
        return {owner: entry.claim for owner, entry in self._entries.items()}

    def check(self) -> None:
        """Raise AssertionError unless the stored sums equal the sums of the claims."""
        summed = {resource: Resource(resource.name) for resource in self.resources}
        for entry in self._entries.values():
            for resource, amount in entry.claim.items():
                assert resource in summed, "a claim is on a resource of another ledger"
                if amount:
                    summed[resource]._add(entry, amount)
        for resource, sums in summed.items():
            assert resource.taken == sums.taken >= 0, (
                f"{resource.taken} of {resource.name} are recorded as taken, {sums.taken} are claimed"
            )
            assert resource._shares == sums._shares, f"the tenants' shares of {resource.name} are wrong"
            assert (resource._draining, resource.draining) == (sums._draining, sums.draining), (
                f"the draining part of {resource.name} is wrong"
            )

    def _entry(self, owner: Owner) -> Entry:
        entry = self._entries.get(owner)
        if entry is None:
            raise LedgerError(f"{_named(owner)} has no claim")
        return entry


def _count(shares: dict[TenantId, int], tenant: TenantId, amount: int) -> None:
    """Change a tenant's part; a tenant without any is removed from the table."""
    now = shares.get(tenant, 0) + amount
    if now:
        shares[tenant] = now
    else:
        shares.pop(tenant, None)


def _named(owner: Owner) -> str:
    return " ".join(map(str, owner))

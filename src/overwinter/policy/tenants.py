"""What share of the workers has each tenant, and who gives one up for whom?

Max-min fairness over tenants. A share is the larger of a tenant's part of the workers and of their memory. Who
waits for room comes in the order of the shares, least first. A tenant takes a worker from another if it has no more
than the other afterwards; one without any takes one from whoever has most. Within a tenant nothing is changed: there
turns.py decides. An idle worker is given up at once; a busy one when it has had its turn: it gets no more work, and is
killed if what it runs does not end within the drain timeout. While others have functions here, one tenant never holds
all workers: a part is kept for who has none.
"""

from overwinter.core.config import MindConfig
from overwinter.core.ids import TenantId
from overwinter.core.profile import Point
from overwinter.policy.state import Body, Function, State, Tenant

KEPT = 16
"""Of so many workers one is kept for other tenants."""
EPSILON = 1e-9
"""Shares that differ by less are equal."""


def alone(state: State) -> bool:
    """Whether there is but one tenant: all is its own."""
    return len(state.tenants) <= 1


def most_bodies(state: State, config: MindConfig) -> int:
    """How many workers one tenant may have."""
    if config.tenant_bodies_max is not None:
        return min(config.tenant_bodies_max, config.bodies_max)
    return config.bodies_max - (0 if alone(state) else config.bodies_max // KEPT)


def has_all(state: State, config: MindConfig, tenant: TenantId) -> bool:
    """Whether the tenant has as many workers as it may have."""
    return state.tenant(tenant).bodies >= most_bodies(state, config)


def share(tenant: Tenant, config: MindConfig, bodies: int = 0, nbytes: int = 0) -> float:
    """The tenant's share of what there is, with so many more workers and so much more of their memory."""
    of_bodies = (tenant.staying + bodies) / config.bodies_max
    if config.memory_bytes is None:
        return of_bodies
    return max(of_bodies, (tenant.nbytes + nbytes) / config.memory_bytes)


def may_take(state: State, config: MindConfig, function: Function, wants: Point, body: Body, most: int) -> bool:
    """Whether a body is stopped for one that a function wants; `most`: workers of the tenant that has most."""
    if body.tenant == function.spec.tenant:
        return True
    if has_all(state, config, function.spec.tenant):
        return False
    taker, giver = state.tenant(function.spec.tenant), state.tenant(body.tenant)
    if not taker.staying:
        return giver.staying == most
    after = share(giver, config, -1, -body.nbytes)
    return share(taker, config, 1, wants.memory_bytes) <= after + EPSILON

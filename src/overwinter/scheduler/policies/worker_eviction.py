"""Which idle worker goes first when others need its room?

An idle worker is an entry of a cache, as a block is. Each rule tells the value of keeping it at the moment when it
becomes idle; the least valuable goes first.
"""

from collections.abc import Callable, Mapping
from math import exp
from types import MappingProxyType
from typing import NamedTuple

from overwinter.core.policies import WorkerEviction

MEMORY_S = 1800.0
"""After so long a use counts for a third: what was once used much is forgotten."""


class Idle(NamedTuple):
    """What a rule may know of a worker that becomes idle."""

    now: float
    clock: float
    """The value of the last one that went for room."""
    uses: float
    """How often it was used lately (`counted`)."""
    cost_s: float
    """Measured time to have it again: to fork a worker, and to bind what it has."""
    nbytes: int
    """What its end gives back."""


Rule = Callable[[Idle], float]


def cost_aware(idle: Idle) -> float:
    """GreedyDual-Size-Frequency, as FaasCache has it for containers: what it costs to bring it back, by how often it is
    used, per byte given back. The clock lets whoever is not used fall behind, for it rises as others go.
    """
    return idle.clock + idle.uses * idle.cost_s / max(idle.nbytes, 1)


def least_recently_used(idle: Idle) -> float:
    """The one idle longest goes first."""
    return idle.now


def counted(uses: float, gap_s: float) -> float:
    """One use more, so long after the last. FaasCache counts from a container's start; this count outlives its workers
    and fades, so that who comes back often is known, and who was used much long ago is not kept for it.
    """
    return 1.0 + uses * exp(-gap_s / MEMORY_S)


RULES: Mapping[WorkerEviction, Rule] = MappingProxyType({"cost-aware": cost_aware, "lru": least_recently_used})

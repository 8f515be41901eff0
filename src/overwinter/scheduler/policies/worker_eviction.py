"""Policies for idle workers: which is evicted first.

An idle worker is an entry of a cache, as a block is. Each policy computes the value of keeping it at the moment when it
becomes idle; the least valuable is evicted first.
"""

from collections.abc import Callable, Mapping
from math import exp
from types import MappingProxyType

import msgspec

from overwinter.core.policies import WorkerEviction

DECAY_S = 1800.0
"""The time constant of the decay of uses: a use this long ago counts 1/e, so that old uses are forgotten."""


class Idle(msgspec.Struct, frozen=True):
    """The input of a policy about a worker that becomes idle."""

    now: float
    clock: float
    """The highest value of an idle worker that was stopped for others."""
    uses: float
    """The decayed count of its family's uses (`counted`), divided by the number of the family's workers."""
    cost_s: float
    """The expected time to replace it: to fork a worker and bind its functions."""
    nbytes: int
    """The bytes that its end frees."""


Rule = Callable[[Idle], float]


def cost_aware(idle: Idle) -> float:
    """GreedyDual-Size-Frequency, as FaasCache uses it for containers: the cost of starting again, times the frequency
    of use, per byte freed. The clock rises with evictions, so unused workers fall behind.
    """
    return idle.clock + idle.uses * idle.cost_s / max(idle.nbytes, 1)


def least_recently_used(idle: Idle) -> float:
    """The worker idle longest is evicted first."""
    return idle.now


def counted(uses: float, gap_s: float) -> float:
    """The count after one more use, with this gap to the last. FaasCache counts from a container's start. This count
    outlives workers and decays, so that a frequent use is known, and an old one is forgotten.
    """
    return 1.0 + uses * exp(-gap_s / DECAY_S)


RULES: Mapping[WorkerEviction, Rule] = MappingProxyType({"cost-aware": cost_aware, "lru": least_recently_used})

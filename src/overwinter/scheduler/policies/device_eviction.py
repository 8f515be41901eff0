"""Policies for devices: which resident function is evicted first when a device is full (Torpor 5.4)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from overwinter.core.policies import DeviceEviction
from overwinter.scheduler.policies.device_binding import is_heavy

LINK_SHARE = 0.1
"""The cost of a transfer besides the wait for it, as a part of its time: it slows other transfers."""
LEAST_S = 1e-3
"""The least time by which a cost is divided."""


class Candidate(msgspec.Struct, frozen=True):
    """The input of a policy about a resident function."""

    unused_s: float
    use_interval_s: float
    """The smoothed time between two uses."""
    nbytes: int
    """The bytes that an eviction would free: those of blocks that no other resident function has, and that the function
    for which it is evicted does not need.
    """
    swap_s: float
    """The time to bring these bytes again."""
    run_s: float
    """The time of one run, which hides up to that much of the transfer."""
    replicas: int
    """The number of other devices on which it is resident."""
    peer_s: float | None = None
    """The time to bring these bytes from such a device, by its fastest link; None: no replica, or none with a link."""
    is_wanted: bool = False
    """Whether requests of it wait."""


Value = tuple[float, float, float]
"""The value of keeping a function; the least valuable is evicted first."""
Rule = Callable[[Candidate], Value]


def cost_aware(candidate: Candidate) -> Value:
    """The time that the next run would wait for the blocks, times the frequency of use, per byte freed. A function with
    another replica may run there, or is copied from there without the host; so its waiting requests do not protect it.
    Any other one with waiting requests is evicted after all others, and one that frees nothing last.
    """
    if not candidate.nbytes:
        return 2.0, -candidate.unused_s, 0.0
    if candidate.peer_s is None:
        waits_s = max(0.0, candidate.swap_s - candidate.run_s) + LINK_SHARE * candidate.swap_s
    else:
        waits_s = max(0.0, candidate.peer_s - candidate.run_s)
    cost = waits_s / (1 + candidate.replicas) / max(candidate.unused_s, candidate.use_interval_s, LEAST_S)
    is_protected = candidate.is_wanted and not candidate.replicas
    return float(is_protected), cost / candidate.nbytes, -candidate.unused_s


def torpor(candidate: Candidate) -> Value:
    """Evict functions with another replica first, then light ones, then heavy ones, whose transfer takes longer than
    their run; of each kind the least recently used first.
    """
    kind = 2.0 if is_heavy(candidate.swap_s, candidate.run_s) else 1.0
    return 0.0 if candidate.replicas else kind, -candidate.unused_s, 0.0


def least_recently_used(candidate: Candidate) -> Value:
    """The least recently used function is evicted first."""
    return -candidate.unused_s, 0.0, 0.0


RULES: Mapping[DeviceEviction, Rule] = MappingProxyType(
    {"cost-aware": cost_aware, "torpor": torpor, "lru": least_recently_used}
)

"""Policies for the host store: which unused function's blocks are evicted first (Tetris 3.4).

Each policy computes the value of keeping a function in its host store; of the candidates, the least valuable is
evicted. Which blocks are needed is computed from the existing functions and not recorded, so a crash leaves no block
that is never freed.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from overwinter.core.policies import Eviction

BLOCK_BYTES = 1 << 20
"""The fixed cost of a block (opening, checking, naming), as bytes copied."""
LEAST_S = 1e-3
"""The least time by which a cost is divided."""


class Candidate(msgspec.Struct, frozen=True):
    """The input of a policy about one function."""

    unused_s: float
    use_interval_s: float
    """The smoothed time between two uses."""
    nbytes: int
    """The bytes that an eviction would free: those of blocks that no other function has."""
    blocks: int
    """The number of all its blocks."""


Rule = Callable[[Candidate], float]


def cost_aware(candidate: Candidate) -> float:
    """The cost of loading again, times the frequency of use, per byte freed. Loading a block costs its bytes and a
    fixed part, so a small head over shared blocks has a higher value per byte than a whole model.
    """
    cost = candidate.nbytes + BLOCK_BYTES * candidate.blocks
    return cost / candidate.nbytes / max(candidate.unused_s, candidate.use_interval_s, LEAST_S)


def least_recently_used(candidate: Candidate) -> float:
    """The least recently used function is evicted first."""
    return -candidate.unused_s


RULES: Mapping[Eviction, Rule] = MappingProxyType({"cost-aware": cost_aware, "lru": least_recently_used})

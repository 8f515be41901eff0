"""Gives a baseline Overwinter's conditions one after the other, to separate their effects from that of its rules.

A baseline as in its paper differs from Overwinter in more than its rules: its workers may copy the runtime and the
weights, and it starts further workers only every 10 s, when it reads the rate. Each step of the comparison gives it one
more of Overwinter's conditions. What still differs after the last step is the effect of the rules.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from overwinter.core.policies import POLICIES, Policy

OURS = POLICIES["overwinter"]


class Condition(NamedTuple):
    """A condition that equals Overwinter's from here on."""

    title: str
    changes: Mapping[str, bool | float]
    """What it changes in the baseline's policy."""
    own_workers: bool = False
    """Whether its workers have the memory of Overwinter's from here on."""


PAPER = Condition("as in the paper", {})
WORKERS = Condition("+ our workers' memory", {}, own_workers=True)
SHARING = Condition("+ sharing", {"shares": OURS.shares})
IMMEDIATE = Condition("+ immediate reaction", {"eager": OURS.eager})
THRESHOLDS = Condition("+ equal thresholds", {"alpha": OURS.alpha, "beta": OURS.beta})


class Step(NamedTuple):
    """A baseline with Overwinter's conditions up to one of them."""

    title: str
    policy: Policy
    own_workers: bool


def with_conditions(policy: Policy, conditions: tuple[Condition, ...]) -> Iterator[Step]:
    """Yield the baseline after each condition, with that one and those before it."""
    own = False
    for condition in conditions:
        policy = msgspec.structs.replace(policy, **condition.changes)
        own = own or condition.own_workers
        yield Step(condition.title, policy, own)

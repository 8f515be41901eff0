"""What does each condition of a comparison win, apart from the rules that are compared?

A baseline as in its paper differs from Overwinter in more than its rules: its workers copy the runtime and the weights,
and it looks at the rate every 10 s. A ladder gives it Overwinter's conditions one after the other. What is left on the
last rung is what the rules themselves win.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from overwinter.core.policies import POLICIES, Policy

OURS = POLICIES["overwinter"]


class Rung(NamedTuple):
    """A condition that equals Overwinter's from here on."""

    title: str
    changes: Mapping[str, bool | float]
    """The changes of the baseline's policy."""
    own_workers: bool = False
    """Whether its workers have the memory of Overwinter's from here on."""


PAPER = Rung("as in the paper", {})
WORKERS = Rung("+ our workers' memory", {}, own_workers=True)
SHARING = Rung("+ sharing", {"shares": OURS.shares})
AT_ONCE = Rung("+ reaction at once", {"eager": OURS.eager})
THRESHOLDS = Rung("+ equal thresholds", {"alpha": OURS.alpha, "beta": OURS.beta})


class Step(NamedTuple):
    """A baseline on a rung."""

    title: str
    policy: Policy
    own_workers: bool


def climb(policy: Policy, rungs: tuple[Rung, ...]) -> Iterator[Step]:
    """Yield the baseline on each rung, with all conditions up to it."""
    own = False
    for rung in rungs:
        policy = msgspec.structs.replace(policy, **rung.changes)
        own = own or rung.own_workers
        yield Step(rung.title, policy, own)

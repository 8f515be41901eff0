"""Decides whether an answer was right at its time, and whether the reason of a refusal was true at its time.

It uses only the author's actions, the killed processes and the answer: nothing of the node's state, and nothing of the
load of the machine.
"""

import hashlib
from collections.abc import Sequence
from math import inf
from time import monotonic

import numpy as np

from benchmarks.fault_injection import Span
from benchmarks.openloop import Outcome

AFTERMATH_S = 5.0
"""The time after a kill in which functions may be in backoff and zygotes start."""
NEAR = 1e-4
"""The largest difference that a shared run may cause, relative to an answer's largest element: a tenth of what
docs/decisions/agreement.md allows, and less than the effect of a version's head.
"""


class Spans:
    """The periods in which something held."""

    def __init__(self) -> None:
        self._all: list[Span] = []

    def begin(self) -> None:
        """It holds from now on; no effect if it did already."""
        if not self._all or self._all[-1].until < inf:
            self._all.append(Span(monotonic(), inf))

    def end(self) -> None:
        """It holds no longer; no effect if it did not."""
        if self._all and self._all[-1].until == inf:
            self._all[-1] = Span(self._all[-1].begin, monotonic())

    def add(self, span: Span) -> None:
        """Add a period."""
        self._all.append(span)

    def overlaps(self, span: Span) -> bool:
        """Whether it held during a part of that time."""
        return any(span.overlaps(each) for each in self._all)


class Version:
    """The correct answers of one version, by input, and when it could give them."""

    def __init__(self, answers: Sequence[bytes], exact: bool) -> None:
        """Create it. `exact`: bit for bit; otherwise 32-bit floats within the tolerance of a shared run."""
        self.served = Spans()
        self._digests = [hashlib.sha256(answer).digest() for answer in answers]
        self._near = [] if exact else [np.frombuffer(answer, np.float32) for answer in answers]

    def is_answer(self, outcome: Outcome, row: int) -> bool:
        """Whether this is its answer to that input."""
        if outcome.digest == self._digests[row]:
            return True
        if not self._near:
            return False
        wanted, given = self._near[row], np.frombuffer(outcome.tensors, np.float32)
        return wanted.shape == given.shape and bool(np.abs(given - wanted).max() <= NEAR * np.abs(wanted).max())


class History:
    """The changes of one function by its author."""

    def __init__(self, may_be_late: bool = True) -> None:
        """Create it. `may_be_late`: late requests are served rather than refused."""
        self.may_be_late = may_be_late
        self.versions: list[Version] = []
        self.gone = Spans()
        """The periods in which it was not deployed, or a version was being removed, whose waiting requests are
        refused.
        """
        self.unloaded = Spans()


class NodeEvents:
    """Events that affect the whole node."""

    def __init__(self) -> None:
        self.kills = Spans()

    def killed(self, stopped_s: float = 0.0) -> None:
        """Record the kill of a process, or its stop for so long."""
        now = monotonic()
        self.kills.add(Span(now, now + stopped_s + AFTERMATH_S))


def verdict(outcome: Outcome, began: float, row: int, history: History, events: NodeEvents) -> tuple[str, Span]:
    """Judge an outcome: right, wrong, refused, expired (which only overload explains) or lost; and return its period.

    `began`: the start of its plan on the monotonic clock; `row`: its input.
    """
    planned_at = began + outcome.planned_at_s
    span = Span(planned_at + outcome.delay_s, planned_at + outcome.latency_s)
    if outcome.status == 200:
        known = [version for version in history.versions if version.is_answer(outcome, row)]
        return "right" if any(version.served.overlaps(span) for version in known) else "wrong", span
    if outcome.status == 504 and "was not answered within" in outcome.start:
        return "expired", span
    explained = outcome.kind == "refused" and may_refuse(outcome, span, history, events)
    return "refused" if explained else "lost", span


def may_refuse(outcome: Outcome, span: Span, history: History, events: NodeEvents) -> bool:
    """Whether the reason that the refusal gives was true in that time."""
    match outcome.status:
        case 404:
            return history.gone.overlaps(span)
        case 500:
            known = any(why in outcome.start for why in ("failed in every attempt", "are out of service"))
            return known and events.kills.overlaps(span)
        case 503 if "is unloaded" in outcome.start:
            return history.unloaded.overlaps(span)
        case 503:
            return "can no longer answer" in outcome.start and not history.may_be_late
        case 504:
            return "hung on" in outcome.start and events.kills.overlaps(span)
        case _:
            return False

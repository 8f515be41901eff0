"""Was an answer right for the time at which it was given, and does a refusal say what was so then?

Only what the author did and which processes were killed is known here, and what the answer says: nothing of the node's
inside, and nothing of how busy the machine was.
"""

import hashlib
from collections.abc import Sequence
from math import inf
from time import monotonic

import numpy as np

from benchmarks.harm import Span
from benchmarks.openloop import Outcome

AFTERMATH_S = 5.0
"""After a kill, functions may rest and zygotes start."""
NEAR = 1e-4
"""Largest difference that a run shared with others may make, of an answer's largest element: a tenth of what
docs/decisions/agreement.md allows, and less than a version's head makes."""


class Spans:
    """When something was so, at most once at a time."""

    def __init__(self) -> None:
        self._all: list[Span] = []

    def begin(self) -> None:
        """It is so from now on; nothing changes if it was."""
        if not self._all or self._all[-1].until < inf:
            self._all.append(Span(monotonic(), inf))

    def end(self) -> None:
        """It is so no longer; nothing changes if it was not."""
        if self._all and self._all[-1].until == inf:
            self._all[-1] = Span(self._all[-1].begin, monotonic())

    def add(self, span: Span) -> None:
        """It was so then."""
        self._all.append(span)

    def meet(self, span: Span) -> bool:
        """Whether it was so for some of that time."""
        return any(span.meets(each) for each in self._all)


class Version:
    """The right answers of one version, by input, and when it could give them."""

    def __init__(self, answers: Sequence[bytes], exact: bool) -> None:
        """`exact`: bit for bit; else 32-bit floats that may be off by as much as a shared run makes."""
        self.served = Spans()
        self._digests = [hashlib.sha256(answer).digest() for answer in answers]
        self._near = [] if exact else [np.frombuffer(answer, np.float32) for answer in answers]

    def gave(self, outcome: Outcome, row: int) -> bool:
        """Whether this is its answer to that input."""
        if outcome.digest == self._digests[row]:
            return True
        if not self._near:
            return False
        wanted, given = self._near[row], np.frombuffer(outcome.tensors, np.float32)
        return wanted.shape == given.shape and bool(np.abs(given - wanted).max() <= NEAR * np.abs(wanted).max())


class History:
    """What its author did to one function."""

    def __init__(self, may_be_late: bool = True) -> None:
        """`may_be_late`: its late requests are served, and not refused."""
        self.may_be_late = may_be_late
        self.versions: list[Version] = []
        self.gone = Spans()
        """Not deployed, or a version of it on its way out, whose waiting requests are refused."""
        self.unloaded = Spans()


class Weather:
    """What happens to the node as a whole."""

    def __init__(self) -> None:
        self.kills = Spans()

    def killed(self) -> None:
        """A worker or a zygote was killed just now."""
        now = monotonic()
        self.kills.add(Span(now, now + AFTERMATH_S))


def verdict(outcome: Outcome, began: float, row: int, history: History, weather: Weather) -> tuple[str, Span]:
    """Right, wrong, refused, expired (which only overload explains) or lost, and when it was under way; `began`: when
    its plan did, of the monotonic clock; `row`: its input.
    """
    due = began + outcome.due_s
    span = Span(due + outcome.late_s, due + outcome.latency_s)
    if outcome.status == 200:
        known = [version for version in history.versions if version.gave(outcome, row)]
        return "right" if any(version.served.meet(span) for version in known) else "wrong", span
    if outcome.status == 504 and "had no answer after" in outcome.start:
        return "expired", span
    explained = outcome.fate == "refused" and may_refuse(outcome, span, history, weather)
    return "refused" if explained else "lost", span


def may_refuse(outcome: Outcome, span: Span, history: History, weather: Weather) -> bool:
    """Whether what the refusal says was so in that time; what it does not say explains nothing."""
    match outcome.status:
        case 404:
            return history.gone.meet(span)
        case 500:
            return "failed twice" in outcome.start and weather.kills.meet(span)
        case 503 if "is unloaded" in outcome.start:
            return history.unloaded.meet(span)
        case 503:
            return "can no longer answer" in outcome.start and not history.may_be_late
        case _:
            return False

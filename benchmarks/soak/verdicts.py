"""Was an answer right for the time at which it was given, and a refusal explained by what was under way then?

Only what the author did, which processes were killed and how busy the machine was is known here, and the status of the
answer: nothing of the node's inside, and none of its sentences.
"""

from math import inf
from time import monotonic

from benchmarks.harm import Span
from benchmarks.openloop import Outcome

AFTERMATH_S = 5.0
"""After a kill, functions may rest and zygotes start."""


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

    def __init__(self, digests: tuple[bytes, ...]) -> None:
        self.digests = digests
        self.served = Spans()


class History:
    """What its author did to one function."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.gone = Spans()
        """Not deployed, or a version of it on its way out, whose waiting requests are refused."""
        self.unloaded = Spans()


class Weather:
    """What happens to the node as a whole."""

    def __init__(self) -> None:
        self.kills = Spans()
        self.overload = Spans()

    def killed(self) -> None:
        """A worker or a zygote was killed just now."""
        now = monotonic()
        self.kills.add(Span(now, now + AFTERMATH_S))


def verdict(outcome: Outcome, began: float, row: int, history: History, weather: Weather) -> str:
    """Right, wrong, refused or lost; `began`: when its plan did, of the monotonic clock; `row`: its input."""
    due = began + outcome.due_s
    span = Span(due + outcome.late_s, due + outcome.latency_s)
    if outcome.status == 200:
        known = [version for version in history.versions if version.digests[row] == outcome.digest]
        return "right" if any(version.served.meet(span) for version in known) else "wrong"
    explained = outcome.fate == "refused" and may_refuse(outcome.status, span, history, weather)
    return "refused" if explained else "lost"


def may_refuse(status: int, span: Span, history: History, weather: Weather) -> bool:
    """Whether a removal, a kill or overload in that time explains a refusal with this status."""
    reasons = {
        404: [history.gone],
        500: [weather.kills],
        503: [history.unloaded, weather.kills, weather.overload],
        504: [weather.kills, weather.overload],
    }
    return any(reason.meet(span) for reason in reasons.get(status, []))

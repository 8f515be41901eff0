"""How do requests of applications, pipelines of functions, go through a simulated node?

As in a node: each stage is a request of its own, with the deadline of the whole; it comes when all that it needs has
been answered, and the first stage that is refused ends the others.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from overwinter.core.events import Arrived, Cancelled
from overwinter.core.ids import RequestId, Seconds
from overwinter.core.pipeline import ready
from overwinter.simulation.latencies import Latencies
from overwinter.simulation.scenario import Application


class ApplicationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one application's requests."""

    requests: int
    answered: int
    refused: dict[str, int]
    """By the error's name of the first stage that was refused."""
    lost: int
    attainment: float | None
    """Share of the requests whose last stage was answered within the promise of the whole."""
    p50_ms: float | None
    p99_ms: float | None


class Tally:
    """Counts of one application."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.requests = self.answered = self.within = 0
        self.refused: Counter[str] = Counter()
        self.latencies = Latencies()

    def figures(self) -> ApplicationFigures:
        """The counts as data."""
        promised = self.application.slo_ms is not None and self.requests
        p50, p99 = self.latencies.quantile(0.5), self.latencies.quantile(0.99)
        return ApplicationFigures(
            requests=self.requests,
            answered=self.answered,
            refused=dict(sorted(self.refused.items())),
            lost=self.requests - self.answered - self.refused.total(),
            attainment=self.within / self.requests if promised else None,
            p50_ms=None if p50 is None else p50 * 1000,
            p99_ms=None if p99 is None else p99 * 1000,
        )


class Passage:
    """One request of an application on its way."""

    def __init__(self, tally: Tally, arrived: Seconds, counts: bool) -> None:
        self.tally = tally
        self.arrived = arrived
        self.counts = counts
        self.begun: dict[str, RequestId] = {}
        self.done: set[str] = set()


class Applications:
    """All applications of a scenario. `ids` numbers requests; what comes before `settle_s` is not counted."""

    def __init__(self, applications: Sequence[Application], ids: Iterator[int], settle_s: float) -> None:
        self._tallies = {application.name: Tally(application) for application in applications}
        self._ids = ids
        self._settle_s = settle_s
        self._open: dict[RequestId, tuple[Passage, str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tallies

    @property
    def open_stages(self) -> int:
        """Stages that have begun, or are about to, and have no answer."""
        return len(self._open)

    def arrived(self, name: str, now: Seconds) -> list[Arrived]:
        """A request of an application: those of its first stages."""
        passage = Passage(self._tallies[name], now, now >= self._settle_s)
        passage.tally.requests += passage.counts
        return self._advance(passage)

    def answered(self, request: RequestId, now: Seconds) -> list[Arrived]:
        """A stage was answered: the requests of the stages that can start now. None for what belongs to nobody."""
        found = self._open.pop(request, None)
        if found is None:
            return []
        passage, stage = found
        passage.done.add(stage)
        application, tally = passage.tally.application, passage.tally
        if passage.counts and len(passage.done) == len(application.stages):
            seconds = now - passage.arrived
            tally.answered += 1
            tally.latencies.add(seconds)
            tally.within += application.slo_ms is not None and seconds <= application.slo_ms / 1000
        return self._advance(passage)

    def refused(self, request: RequestId, error: str) -> list[Cancelled]:
        """A stage was refused, and the whole with it: the others under way are given up."""
        found = self._open.pop(request, None)
        if found is None:
            return []
        passage, _ = found
        if passage.counts:
            passage.tally.refused[error] += 1
        return [Cancelled(other) for other in passage.begun.values() if self._open.pop(other, None) is not None]

    def figures(self) -> dict[str, ApplicationFigures]:
        """By application."""
        return {name: tally.figures() for name, tally in self._tallies.items()}

    def _advance(self, passage: Passage) -> list[Arrived]:
        application = passage.tally.application
        deadline = Seconds(passage.arrived + application.timeout_s)
        events = []
        for name in ready(application.stages, passage.done, passage.begun):
            id_ = passage.begun[name] = RequestId(next(self._ids))
            self._open[id_] = (passage, name)
            events.append(Arrived(id_, application.stages[name].function, None, deadline))
        return events

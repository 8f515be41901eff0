"""Carries out the requests of applications (pipelines of functions) on a simulated node.

`core/stepper.py` decides which stage runs when, and when a request is complete, as on a node. Here each stage becomes a
request to its function.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from overwinter.core.due_times import due_times
from overwinter.core.events import Arrived, Cancelled
from overwinter.core.ids import FunctionName, RequestId, Seconds
from overwinter.core.stepper import (
    Answered,
    Cancel,
    Event,
    Fail,
    Failed,
    PipelineRequest,
    RunStage,
    Started,
    Succeed,
    step,
)
from overwinter.simulation.scenario import Application
from overwinter.telemetry.report import Outcomes, RequestFigures


class ApplicationOutcomes(Outcomes):
    """Counts of one application."""

    def __init__(self, application: Application, slos: Mapping[FunctionName, float | None]) -> None:
        super().__init__(FunctionName(application.name))
        self.application = application
        self.slo_s = None if application.slo_ms is None else application.slo_ms / 1000
        self._slos = {name: slos.get(stage.function) for name, stage in application.stages.items()}

    def due_times(self, arrived: Seconds) -> dict[str, Seconds]:
        """The due time of each stage of a request."""
        return due_times(self.application.stages, self.application.slo_ms, self._slos, arrived)


class ApplicationRequest:
    """One open request of an application."""

    def __init__(self, outcomes: ApplicationOutcomes, arrived: Seconds, counted: bool) -> None:
        self.outcomes = outcomes
        self.arrived = arrived
        self.counted = counted
        application = outcomes.application
        deadline = Seconds(arrived + application.timeout_s)
        self.request = PipelineRequest(application.stages, deadline, outcomes.due_times(arrived))
        self.ids: dict[str, RequestId] = {}
        """The requests of the stages that were started."""

    def succeeded(self, now: Seconds) -> None:
        """Handle the success of the request: all stages were answered."""
        if self.counted:
            seconds, slo_s = now - self.arrived, self.outcomes.slo_s
            self.outcomes.answered += 1
            self.outcomes.latencies.add(seconds)
            self.outcomes.in_slo += slo_s is not None and seconds <= slo_s

    def failed(self, error: str) -> None:
        """Handle the failure of the request: a stage was refused, or the deadline passed before one began."""
        if self.counted:
            self.outcomes.refused[error] += 1


class Applications:
    """All applications of a scenario. `ids` numbers requests; requests before `settle_s` are not counted; `slos`: the
    SLOs of the functions in ms.
    """

    def __init__(
        self,
        applications: Sequence[Application],
        ids: Iterator[int],
        settle_s: float,
        slos: Mapping[FunctionName, float | None],
    ) -> None:
        self._outcomes = {application.name: ApplicationOutcomes(application, slos) for application in applications}
        self._ids = ids
        self._settle_s = settle_s
        self._open: dict[RequestId, tuple[ApplicationRequest, str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._outcomes

    @property
    def open_stages(self) -> int:
        """The stages that have begun, or are about to, and are not answered."""
        return len(self._open)

    def arrived(self, name: str, now: Seconds) -> list[Arrived | Cancelled]:
        """Start a request of an application: return the requests of its first stages."""
        open_request = ApplicationRequest(self._outcomes[name], now, now >= self._settle_s)
        open_request.outcomes.requests += open_request.counted
        return self._step(open_request, Started(), now)

    def answered(self, request: RequestId, now: Seconds) -> list[Arrived | Cancelled]:
        """Handle the answer of a stage: return the events for other stages; none for requests outside of
        applications.
        """
        open_request, stage = self._open.pop(request, (None, ""))
        return [] if open_request is None else self._step(open_request, Answered(stage), now)

    def refused(self, request: RequestId, error: str, now: Seconds) -> list[Arrived | Cancelled]:
        """Handle the refusal of a stage: return the events for other stages; none for requests outside of
        applications.
        """
        open_request, stage = self._open.pop(request, (None, ""))
        return [] if open_request is None else self._step(open_request, Failed(stage, error), now)

    def figures(self) -> dict[str, RequestFigures]:
        """Return the figures of each application."""
        return {name: outcomes.request_figures() for name, outcomes in self._outcomes.items()}

    def _step(self, open_request: ApplicationRequest, event: Event, now: Seconds) -> list[Arrived | Cancelled]:
        events: list[Arrived | Cancelled] = []
        for order in step(open_request.request, event, now):
            match order:
                case RunStage(name, stage, deadline, due):
                    id_ = open_request.ids[name] = RequestId(next(self._ids))
                    self._open[id_] = (open_request, name)
                    events.append(Arrived(id_, stage.function, stage.version, deadline, due=due))
                case Cancel(name):
                    del self._open[open_request.ids[name]]
                    events.append(Cancelled(open_request.ids[name]))
                case Succeed():
                    open_request.succeeded(now)
                case Fail(_, error):
                    open_request.failed(error)
                case _:
                    assert_never(order)
        return events

"""Runs of handlers in simulated workers, and the calls of their programs on simulated devices.

As on a node, all requests to one function in a run make one call, and the functions of a shared run make their calls
one after the other. A call is as urgent as the most urgent of its requests, and is cancelled when none of them waits
any more. With `device = "any"` the worker runs the program itself if no devices can hold it, or if the call is refused
for another reason than its deadline.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import NamedTuple

from overwinter.core.actions import Refuse, Reply, Run
from overwinter.core.errors import DeadlineError, WorkerError
from overwinter.core.events import Arrived, Cancelled, Event, RunEnded, RunFailure
from overwinter.core.ids import (
    FunctionId,
    FunctionName,
    RequestId,
    RunId,
    Seconds,
    WorkerId,
    program_id,
    program_name,
    whole_names,
)
from overwinter.scheduler.policies.queueing import ORDINARY
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.machine import SimulatedWorker
from overwinter.simulation.timeline import Callback, Timeline

ABANDONED = "nobody waits for this run any more"

Work = Callable[[SimulatedWorker, int, float, float | None, Callback], None]
"""Keeps this many cores of a worker busy for these seconds, then calls the last argument. If a share is given (not
None), the worker dies after this share of the time instead.
"""


class _Call(NamedTuple):
    """A call of a program, for these requests of one function."""

    run: "_HandlerRun"
    function: SimulatedFunction
    requests: tuple[RequestId, ...]


class _Waiting:
    """A request to a handler that is not answered yet."""

    def __init__(self, arrived: Seconds, event: Arrived) -> None:
        self.arrived = arrived
        self.deadline, self.due = event.deadline, event.due
        self.run: _HandlerRun | None = None


class _HandlerRun:
    """A run of a handler in a worker."""

    def __init__(self, process: SimulatedWorker, id_: RunId, requests: int, variation: float) -> None:
        self.process = process
        self.id = id_
        self.requests = requests
        self.variation = variation
        self.left: list[_Call] = []
        """The calls that follow."""
        self.call: RequestId | None = None
        """The call in progress."""
        self.program_s: list[float] = []
        """The times of the calls that the worker answered itself."""
        self.failures: list[RunFailure] = []
        self.over = False

    def fail(self, call: _Call, error: str, message: str) -> None:
        """The requests of a call fail."""
        self.failures += [RunFailure(request, error, message) for request in call.requests]


class Handlers:
    """All runs of handlers. `ids` numbers their calls, `handle` gets the events; `separate_run_s` returns the time of a
    run of a worker's program with this many requests.
    """

    def __init__(
        self,
        functions: Mapping[FunctionId, SimulatedFunction],
        ids: Iterator[int],
        timeline: Timeline,
        handle: Callable[[Event], None],
        work: Work,
        separate_run_s: Callable[[SimulatedWorker, int], float],
    ) -> None:
        self._functions = functions
        self._names: set[FunctionName] = {
            each.spec.name for each in functions.values() if each.model.handler is not None
        }
        self._ids = ids
        self._timeline = timeline
        self._handle = handle
        self._work = work
        self._separate_run_s = separate_run_s
        self._waiting: dict[RequestId, _Waiting] = {}
        self._runs: dict[WorkerId, list[_HandlerRun]] = {}
        self._calls: dict[RequestId, _Call] = {}

    def call_size(self, request: RequestId) -> int:
        """Return the number of requests for which a call of a program was made; 1 for any other request."""
        call = self._calls.get(request)
        return 1 if call is None else len(call.requests)

    def observe(self, event: Event) -> None:
        """Record the requests to handlers that arrive, and those that are cancelled."""
        if isinstance(event, Arrived) and event.name in self._names:
            self._waiting[event.request] = _Waiting(Seconds(self._timeline.now), event)
        elif isinstance(event, Cancelled):
            self._calls.pop(event.request, None)
            self._ended(event.request)

    def ended(self, action: Reply | Refuse) -> None:
        """A request, or a call of a program, is answered or refused."""
        call = self._calls.pop(action.request, None)
        if call is None:
            self._ended(action.request)
        elif call.run.call == action.request:
            if isinstance(action, Refuse):
                if call.function.spec.settings.device == "any" and action.error != DeadlineError.__name__:
                    call.run.call = None
                    self._timeline.after(0.0, partial(self._run_program, call))
                    return
                call.run.fail(call, action.error, whole_names(action.message))
            self._go_on(call.run)

    def run(self, process: SimulatedWorker, action: Run, variation: float, crash: float | None) -> None:
        """Begin a run: first the handler's part before the program, in which the worker may crash."""
        run = _HandlerRun(process, action.run, len(action.requests), variation)
        self._runs.setdefault(process.worker, []).append(run)
        function_ids = action.functions or (action.function or process.function.spec.id,) * len(action.requests)
        requests_of: dict[FunctionId, list[RequestId]] = {}
        for function, request in zip(function_ids, action.requests, strict=True):
            requests_of.setdefault(function, []).append(request)
            if request in self._waiting:
                self._waiting[request].run = run
        run.left = [_Call(run, self._functions[id_], tuple(requests)) for id_, requests in requests_of.items()]
        handler = process.function.model.handler
        assert handler is not None
        seconds = handler.before_s(run.requests) * variation
        self._work(process, process.run_cores, seconds, crash, partial(self._call, run))

    def exited(self, worker: WorkerId, seconds: float) -> None:
        """A worker ends. Its calls are cancelled when the scheduler knows, after this many seconds."""
        for run in self._runs.pop(worker, []):
            run.over = True
            if run.call is not None:
                self._timeline.after(seconds, partial(self._handle, Cancelled(run.call)))
                run.call = None

    def _ended(self, request: RequestId) -> None:
        """A request waits no more. A call that nobody waits for is cancelled, and its run goes on without an answer."""
        waiting = self._waiting.pop(request, None)
        run = None if waiting is None else waiting.run
        if run is None or run.call is None:
            return
        call = self._calls[run.call]
        if not any(each in self._waiting for each in call.requests):
            self._timeline.after(0.0, partial(self._handle, Cancelled(run.call)))
            run.fail(call, WorkerError.__name__, ABANDONED)
            self._go_on(run)

    def _go_on(self, run: _HandlerRun) -> None:
        """The call in progress has ended. What follows is no part of the scheduler's current step."""
        run.call = None
        self._timeline.after(0.0, partial(self._call, run))

    def _run_program(self, call: _Call) -> None:
        """The worker runs the program itself, and then goes on."""
        run, began = call.run, self._timeline.now
        if run.over:
            return

        def answered() -> None:
            run.program_s.append(self._timeline.now - began)
            self._call(run)

        seconds = self._separate_run_s(run.process, len(call.requests)) * run.variation
        self._work(run.process, run.process.run_cores, seconds, None, answered)

    def _call(self, run: _HandlerRun) -> None:
        """Call the program for the next function; after the last one comes the handler's part after the program."""
        if run.over:
            return
        while run.left:
            call = run.left.pop(0)
            waiting = [self._waiting[request] for request in call.requests if request in self._waiting]
            if waiting and program_id(call.function.spec.id) not in self._functions:
                self._run_program(call)
                return
            if waiting:
                run.call = RequestId(next(self._ids))
                self._calls[run.call] = call
                self._handle(_request(run, run.call, call.function, waiting))
                return
            run.fail(call, WorkerError.__name__, ABANDONED)
        handler, answered = run.process.function.model.handler, run.requests - len(run.failures)
        assert handler is not None
        seconds = handler.after_s(answered) * run.variation if answered else 0.0
        self._work(run.process, run.process.run_cores, seconds, None, partial(self._end, run))

    def _end(self, run: _HandlerRun) -> None:
        run.over = True
        self._runs[run.process.worker].remove(run)
        program_s = fmean(run.program_s) if run.program_s else 0.0
        self._handle(RunEnded(run.process.worker, run.id, tuple(run.failures), program_s=program_s))


def _request(run: _HandlerRun, id_: RequestId, function: SimulatedFunction, waiting: list[_Waiting]) -> Arrived:
    """Return the request to a program that a node would make."""
    spec = function.spec
    deadlines = [each.deadline for each in waiting if each.deadline is not None]
    deadline = max(deadlines) if len(deadlines) == len(waiting) else None
    dues = [each.due for each in waiting if each.due is not None]
    if spec.settings.slo_ms is not None:
        dues += [Seconds(each.arrived + spec.settings.slo_ms / 1000) for each in waiting]
    caller = (run.process.worker, run.id)
    return Arrived(id_, program_name(spec.name), spec.version, deadline, ORDINARY, min(dues, default=None), caller)

"""Runs the node's own scheduler on a simulated machine.

The world feeds events to `scheduler.Scheduler` and carries out its actions: those that a node answers by an event take
their time on the timeline, and are answered too. All randomness comes from the scenario's seed: equal scenarios with
equal traces give equal journals.
"""

from collections.abc import Callable, Iterator
from functools import partial
from heapq import merge
from itertools import count, repeat, takewhile
from math import inf
from operator import gt
from pathlib import Path
from random import Random
from typing import IO, assert_never

import msgspec

from overwinter.core.actions import (
    Action,
    Bind,
    Drop,
    Evict,
    Explanation,
    ForkAhead,
    LoadBlocks,
    LoadFinished,
    Prepare,
    PrepareOnDevice,
    Refuse,
    Reply,
    Run,
    RunOnDevice,
    SetAlarm,
    StartExecutor,
    StartWorker,
    StopWorker,
    Unbind,
)
from overwinter.core.events import (
    Alarm,
    Arrived,
    BlocksLoaded,
    Deployed,
    Event,
    LoadFailed,
    RateForecast,
    ZygoteLost,
)
from overwinter.core.ids import FunctionId, FunctionName, OperationId, RequestId, Seconds
from overwinter.core.journal import Journal
from overwinter.core.policies import policy_named
from overwinter.scheduler.invariants import check
from overwinter.scheduler.scheduler import Scheduler
from overwinter.simulation.applications import Applications
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.durations import Durations
from overwinter.simulation.executors import Executors
from overwinter.simulation.faults import FaultModel
from overwinter.simulation.forecasts import rates_ahead
from overwinter.simulation.machine import HostBlocks, SerialResource
from overwinter.simulation.models import MIB
from overwinter.simulation.scenario import Application, Scenario
from overwinter.simulation.streams import Arrival, by_time
from overwinter.simulation.timeline import Timeline
from overwinter.simulation.workers import SharedParts, Workers
from overwinter.simulation.workloads import Workload, arrivals
from overwinter.telemetry.report import Report, StepReader

RING = 1
"""The steps that the journal keeps in memory in addition to its file."""
DRAIN_TIMEOUTS = 10
"""The longest that the world continues after `duration_s` with open requests, as a multiple of the longest timeout."""
PROGRESS_EVERY = 1024
CHECK_EVERY = 32
"""The steps between two checks of the scheduler's tables, if they are checked."""


class World:
    """One simulation of a scenario. `base` is the directory of recorded traces; every step is written to `journal`, if
    it is given. With `checked`, the scheduler's tables are checked at intervals, which is slow.
    """

    def __init__(
        self, scenario: Scenario, base: Path = Path(), journal: IO[bytes] | None = None, checked: bool = False
    ) -> None:
        self._scenario = scenario
        self._machine = scenario.node
        self._checked = checked
        self._steps = 0
        self._functions = scenario.simulated_functions()
        self._by_id: dict[FunctionId, SimulatedFunction] = {each.spec.id: each for each in self._functions}
        self._durations = Durations(self._by_id, self._random_for("jitter"))
        self._timeline = Timeline()
        self._host = HostBlocks(None if self._machine.host_mib is None else self._machine.host_mib * MIB)
        self._disk, self._zygote = SerialResource(), SerialResource()
        self.executors = Executors(scenario.devices, self._timeline, self._handle)
        self._alarm_at = inf
        self._faults = FaultModel(scenario.faults, self._random_for("faults"))
        config = scenario.scheduler_config()
        self._policy = policy_named(config.policy)
        self._scheduler = Scheduler(config)
        self._journal = None if journal is None else Journal(config, RING, journal)
        settle_s = 0.0 if scenario.applications else scenario.settle_s
        self.reader = StepReader(scenario.duration_s, self._policy.shares, settle_s)
        self._ids = count(1)
        shared_parts = SharedParts(self._machine, self._timeline, self._host, self._zygote, self._faults, self._handle)
        self._workers = Workers(self._by_id, self._durations, shared_parts, self._policy.shares, self._ids)
        self._has_handlers = any(each.model.handler is not None for each in self._functions)
        slos = {each.spec.name: each.spec.settings.slo_ms for each in self._functions}
        self._applications = Applications(scenario.applications, self._ids, scenario.settle_s, slos)
        self._requests = by_time(self._arrival_streams(base))
        self._rate_forecast = {
            each.spec.id: rates_ahead((at for at, _ in self._arrivals_ahead(each, base)), self._policy.period_s)
            for each in self._functions
            if self._policy.rate == "oracle" and self._is_called(each)
        }

    def run(self, progress: Callable[[float], None] | None = None) -> Report:
        """Simulate `duration_s`, and then until no request is open, at most for DRAIN_TIMEOUTS times the longest
        timeout; call `progress` from time to time with the simulated seconds.
        """
        self._begin()
        timeline, handle = self._timeline, self._handle
        applications = {application.name for application in self._scenario.applications}
        for number, (at, name) in enumerate(self._requests, 1):
            timeline.run_until(at)
            if name in applications:
                for event in self._applications.arrived(name, Seconds(at)):
                    handle(event)
            else:
                handle(Arrived(RequestId(next(self._ids)), name, None, None))
            if progress is not None and number % PROGRESS_EVERY == 0:
                progress(at)
        self._drain()
        if self._checked:
            check(self._scheduler.cycle)
        if progress is not None:
            progress(self._scenario.duration_s)
        report = self.reader.report(Seconds(timeline.now))
        return msgspec.structs.replace(report, applications=self._applications.figures())

    def _random_for(self, *names: object) -> Random:
        """Return a separate random stream for each purpose: a further function changes the arrivals of no other."""
        return Random(repr((self._scenario.seed, *names)))

    def _arrival_streams(self, base: Path) -> Iterator[Iterator[Arrival]]:
        yield from (self._own_arrivals(each, base) for each in self._functions)
        for application in self._scenario.applications:
            yield self._arrivals(FunctionName(application.name), application.workload, 0, base)

    def _own_arrivals(self, each: SimulatedFunction, base: Path) -> Iterator[Arrival]:
        """Yield the requests of a function that are not stages of an application."""
        workload = each.model.workload
        return iter(()) if workload is None else self._arrivals(each.spec.name, workload, each.copy, base)

    def _arrivals_ahead(self, each: SimulatedFunction, base: Path) -> Iterator[Arrival]:
        """Yield the requests of a function, those of an application when the application's request arrives."""
        called = [self._arrivals(FunctionName(one.name), one.workload, 0, base) for one in self._calling(each)]
        return merge(self._own_arrivals(each, base), *called)

    def _is_called(self, each: SimulatedFunction) -> bool:
        return each.model.workload is not None or any(self._calling(each))

    def _calling(self, each: SimulatedFunction) -> Iterator[Application]:
        """Yield the applications that call a function, once for each stage."""
        for application in self._scenario.applications:
            for stage in application.stages.values():
                if stage.function == each.spec.name:
                    yield application

    def _arrivals(self, name: FunctionName, workload: Workload, copy: int, base: Path) -> Iterator[Arrival]:
        times = arrivals(workload, self._random_for("arrivals", name), copy, base)
        return zip(takewhile(partial(gt, self._scenario.duration_s), times), repeat(name))

    def _begin(self) -> None:
        for each in self._functions:
            self._handle(Deployed(each.spec))
        for function in self._rate_forecast:
            self._forecast(function)
        self._await_zygote_death()

    def _forecast(self, function: FunctionId) -> None:
        """Send the rate of the following period to the scheduler, ten times in each period."""
        at, rate = next(self._rate_forecast[function])
        if at < self._scenario.duration_s:
            self._timeline.at(at, partial(self._handle, RateForecast(function, rate)))
            self._timeline.at(at, partial(self._forecast, function))

    def _drain(self) -> None:
        timeouts = [each.spec.settings.timeout_s for each in self._functions]
        longest = max((*timeouts, *(each.timeout_s for each in self._scenario.applications)), default=0.0)
        end = self._scenario.duration_s
        last = end + DRAIN_TIMEOUTS * longest
        while self._timeline.next_at() <= (last if self._has_open_requests() else end):
            self._timeline.step()
        self._timeline.now = max(self._timeline.now, end)

    def _has_open_requests(self) -> bool:
        return bool(self.reader.open_requests or self._applications.open_stages)

    def _handle(self, event: Event) -> None:
        now = Seconds(self._timeline.now)
        actions = self._scheduler.handle(event, now)
        if self._journal is not None:
            self._journal.record(now, event, actions)
        self.reader.observe(now, event, actions)
        if self._has_handlers:
            self._workers.handlers.observe(event)
        self._steps += 1
        if self._checked and self._steps % CHECK_EVERY == 0:
            check(self._scheduler.cycle)
        for action in actions:
            self._carry_out(action)

    def _post(self, seconds: float, event: Event) -> None:
        """Post an event this many seconds from now; never inside the current step."""
        self._timeline.after(seconds, partial(self._handle, event))

    def _carry_out(self, action: Action) -> None:  # noqa: C901, PLR0912
        match action:
            case Run():
                self._workers.run(action)
            case Reply() | Refuse():
                if self._has_handlers:
                    self._workers.handlers.ended(action)
                if self._scenario.applications:
                    self._continue(action)
            case SetAlarm(at):
                self._alarm_at = at
                self._timeline.at(at, partial(self._ring, at))
            case StartWorker():
                self._workers.start(action)
            case ForkAhead(worker, id_):
                self._workers.fork_ahead(worker, id_)
            case Bind():
                self._workers.bind(action)
            case StartExecutor():
                self._start_executor(action)
            case RunOnDevice():
                self._run_on_device(action)
            case PrepareOnDevice():
                self.executors.prepare(action, self._by_id[action.function].model.prepare_s)
            case StopWorker(worker) if worker in self.executors:
                self.executors.exit(worker, "stopped", self._machine.stop_s)
            case StopWorker(worker):
                self._workers.exit(worker, "WorkerError", "stopped", self._machine.stop_s)
            case Unbind(worker, function):
                # The time of an unbind is negligible.
                self.executors.unbind(worker, function)
            case LoadBlocks(function, operation):
                self._load_blocks(self._by_id[function], operation)
            case Drop(addresses, store):
                self._host.drop(addresses, store)
            case Prepare():
                self._workers.prepare(action)
            case LoadFinished() | Evict() | Explanation():
                pass
            case _:
                assert_never(action)

    def _continue(self, action: Reply | Refuse) -> None:
        """Continue an application's request after a stage has ended."""
        now = Seconds(self._timeline.now)
        if isinstance(action, Reply):
            events = self._applications.answered(action.request, now)
        else:
            events = self._applications.refused(action.request, action.error, now)
        for event in events:
            self._post(0.0, event)

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = inf
            self._handle(Alarm())

    # Blocks

    def _load_blocks(self, function: SimulatedFunction, operation: OperationId) -> None:
        now, spec, missing = self._timeline.now, function.spec, self._host.missing(function.spec)
        added = sum(missing.values())
        addresses = tuple(blob.address for blob in spec.blobs) if missing else ()
        if missing and (self._faults.store_full(now) or not self._host.fits(missing)):
            message = f"the host store has no space for {added} bytes of function {spec.id}"
            self._post(0.0, LoadFailed(spec.id, operation, "NoSpaceError", message, addresses, spec.store))
            return
        if missing:
            seconds = added / (self._machine.disk_mib_per_s * MIB) * self._faults.slowness()
            self._host.add(missing, spec.store, self._disk.take(now, seconds))
        loaded = BlocksLoaded(spec.id, operation, added, addresses, spec.store)
        self._timeline.at(self._host.ready_at(spec, now), partial(self._handle, loaded))

    # Executors

    def _start_executor(self, action: StartExecutor) -> None:
        forked = self._zygote.take(self._timeline.now, self._machine.fork_s)
        seconds = forked - self._timeline.now + self._machine.executor_start_s * self._faults.slowness()
        self.executors.start(action, seconds, self._faults.start_crash(), self._faults.executor_life_s())

    def _run_on_device(self, action: RunOnDevice) -> None:
        function_ids = action.functions or (action.function,) * len(action.requests)
        functions = [self._by_id[id_] for id_ in dict.fromkeys(function_ids or (action.function,))]
        if not all(self._host.holds(each.spec, self._timeline.now) for each in functions):
            raise RuntimeError(f"run {action.run} is sent to a device, and its blocks are not in the host store")
        sizes = map(self._workers.handlers.call_size, action.requests)
        repeated_ids = [id_ for id_, count in zip(function_ids, sizes, strict=True) for _ in range(count)]
        seconds = self._durations.on_device_s(repeated_ids) if repeated_ids else 0.0
        self.executors.run(action, functions, seconds, self._faults.run_crash(), self._faults.unplaced())

    # Zygotes

    def _await_zygote_death(self) -> None:
        life = self._faults.zygote_life_s()
        if life is not None and self._timeline.now + life < self._scenario.duration_s:
            self._timeline.after(life, self._zygote_dies)

    def _zygote_dies(self) -> None:
        self._zygote.close_until(self._timeline.now + self._machine.zygote_start_s)
        self._workers.zygote_died()
        for executor in self.executors.ids:
            self.executors.exit(executor, "its zygote died")
        self._handle(ZygoteLost())
        self._await_zygote_death()

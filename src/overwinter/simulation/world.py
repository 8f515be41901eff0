"""How does the node's own mind fare in a modelled world?

The world feeds `policy.mind.Mind` as a node does, one event after another, and carries its actions out on a modelled
machine: each takes its time on the timeline and comes back as an event. No decision is made here. All chance comes
from the scenario's seed, so the same scenario gives the same journal, byte for byte.
"""

from collections.abc import Callable, Iterator
from functools import partial
from heapq import merge
from math import inf
from pathlib import Path
from random import Random
from typing import IO, assert_never

from overwinter.core.actions import (
    Action,
    Announce,
    Drop,
    Prepare,
    Refuse,
    Reply,
    Run,
    SetAlarm,
    Stage,
    StartBody,
    StopBody,
)
from overwinter.core.events import (
    Alarm,
    Arrived,
    BodyExited,
    BodyReady,
    Deployed,
    Event,
    RunEnded,
    Staged,
    StageFailed,
    ZygoteLost,
)
from overwinter.core.ids import Address, FunctionId, FunctionName, RequestId, Seconds, WorkerId
from overwinter.core.journal import Journal
from overwinter.policy.mind import Mind
from overwinter.policy.state import check_integrity
from overwinter.simulation.faults import Chance
from overwinter.simulation.machine import Cores, HostBlocks, Job, Queue
from overwinter.simulation.report import Report, StepReader
from overwinter.simulation.scenario import MIB, Scenario, Simulated, latency_s
from overwinter.simulation.timeline import Timeline
from overwinter.simulation.workloads import arrivals

RING = 16
"""Steps that the journal keeps: whoever wants them all asks for a file."""
DRAIN_TIMEOUTS = 10
"""How many of the longest timeouts the world goes on after the last arrival, at most, while requests are open."""
PROGRESS_EVERY = 1024


class ModelledBody:
    """A worker process that is none: whose it is, and what keeps it busy."""

    __slots__ = ("function", "job", "worker")

    def __init__(self, worker: WorkerId, function: Simulated) -> None:
        self.worker = worker
        self.function = function
        self.job: Job | None = None


class World:
    """One simulation of a scenario.

    `base` is where the paths of recorded traces begin. Every step is written to `journal`, if it is given. `checked`
    holds the mind's tables to each other after each step, which is slow.
    """

    def __init__(
        self, scenario: Scenario, base: Path = Path(), journal: IO[bytes] | None = None, checked: bool = False
    ) -> None:
        self._scenario = scenario
        self._machine = scenario.node
        self._checked = checked
        self._functions = scenario.simulated()
        self._by_id: dict[FunctionId, Simulated] = {each.spec.id: each for each in self._functions}
        self._run_s: dict[tuple[str, int], float] = {}
        self._timeline = Timeline()
        self._cores = Cores(self._machine.cores, self._timeline)
        self._host = HostBlocks(None if self._machine.host_mib is None else self._machine.host_mib * MIB)
        self._disk, self._zygote = Queue(), Queue()
        self._prepared: set[Address] = set()
        self._bodies: dict[WorkerId, ModelledBody] = {}
        self._alarm_at = inf
        self._chance = Chance(scenario.faults, self._stream("faults"))
        self._jitter = self._stream("jitter")
        self._mind = Mind(scenario.mind)
        self._journal = Journal(scenario.mind, RING, journal)
        body_bytes = {each.spec.id: each.model.body_mib * MIB for each in self._functions}
        self._reader = StepReader(body_bytes, scenario.duration_s)
        self._requests = merge(*(self._arrivals(each, base) for each in self._functions))

    def run(self, progress: Callable[[float], None] | None = None) -> Report:
        """Simulate until every request has its answer. `progress` is told the seconds simulated, now and then."""
        self._begin()
        timeline, turn = self._timeline, self._turn
        for number, (at, name) in enumerate(self._requests, 1):
            while timeline.next_at() <= at:
                timeline.step()
            timeline.now = at
            turn(Arrived(RequestId(number), name, None, None))
            if progress is not None and number % PROGRESS_EVERY == 0:
                progress(at)
        self._drain()
        if progress is not None:
            progress(self._scenario.duration_s)
        return self._reader.report(Seconds(timeline.now))

    def _stream(self, *names: object) -> Random:
        """Random numbers of their own for each purpose: one function more changes nothing for the others."""
        return Random(repr((self._scenario.seed, *names)))

    def _arrivals(self, each: Simulated, base: Path) -> Iterator[tuple[float, FunctionName]]:
        name, end = each.spec.name, self._scenario.duration_s
        for at in arrivals(each.model.workload, self._stream("arrivals", name), each.sibling, base):
            if at >= end:
                return
            yield at, name

    def _begin(self) -> None:
        for each in self._functions:
            self._turn(Deployed(each.spec))
        self._await_zygote_death()

    def _drain(self) -> None:
        longest = max((each.spec.settings.timeout_s for each in self._functions), default=0.0)
        end = self._scenario.duration_s
        last = end + DRAIN_TIMEOUTS * longest
        while self._timeline.next_at() <= (last if self._reader.open_requests else end):
            self._timeline.step()
        self._timeline.now = max(self._timeline.now, end)

    def _turn(self, event: Event) -> None:
        now = Seconds(self._timeline.now)
        actions = self._mind.handle(event, now)
        self._journal.record(now, event, actions)
        self._reader.observe(now, event, actions)
        if self._checked:
            check_integrity(self._mind.state)
        for action in actions:
            self._carry_out(action)

    def _post(self, seconds: float, event: Event) -> None:
        """An event comes so many seconds from now; never inside the step under way."""
        self._timeline.after(seconds, partial(self._turn, event))

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply() | Refuse() | Announce():
                # The reader of the steps counts them.
                pass
            case Run():
                self._run(action)
            case SetAlarm(at):
                self._alarm_at = at
                self._timeline.at(at, partial(self._ring, at))
            case StartBody():
                self._start(action)
            case StopBody(worker):
                self._exit(worker, "WorkerError", "stopped", self._machine.stop_s)
            case Stage(function):
                self._stage(self._by_id[function])
            case Drop(addresses):
                self._host.drop(addresses)
            case Prepare(function):
                model = self._by_id[function]
                self._prepared.add(model.spec.program)
                self._zygote.take(self._timeline.now, model.model.prepare_s)
            case _:
                assert_never(action)

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = inf
            self._turn(Alarm())

    # Blocks

    def _stage(self, function: Simulated) -> None:
        now, spec = self._timeline.now, function.spec
        missing = self._host.missing(spec.blobs)
        added = sum(missing.values())
        addresses = tuple(blob.address for blob in spec.blobs) if missing else ()
        if missing and (self._chance.store_full(now) or not self._host.has_room(missing)):
            message = f"the host store has no room for {added} bytes of function {spec.id}"
            self._post(0.0, StageFailed(spec.id, "NoSpaceError", message, addresses))
            return
        if missing:
            seconds = added / (self._machine.disk_mib_per_s * MIB) * self._chance.slowness()
            self._host.add(missing, self._disk.take(now, seconds))
        self._timeline.at(self._host.ready_at(spec.blobs), partial(self._turn, Staged(spec.id, added, addresses)))

    # Bodies

    def _start(self, action: StartBody) -> None:
        function = self._by_id[action.function]
        body = self._bodies[action.worker] = ModelledBody(action.worker, function)
        if not self._host.holds(function.spec.blobs, self._timeline.now):
            self._exit(body.worker, "StoreError", "a block is not in the host store", lost_blocks=True)
            return
        life = self._chance.body_life_s()
        if life is not None:
            self._timeline.after(life, partial(self._exit, body.worker, "WorkerError", "killed by a fault"))
        forked = self._zygote.take(self._timeline.now, self._machine.fork_s)
        self._timeline.at(forked, partial(self._load, body))

    def _load(self, body: ModelledBody) -> None:
        if body.worker not in self._bodies:
            return
        model = body.function.model
        prepared = body.function.spec.program in self._prepared
        seconds = (model.start_s + (0.0 if prepared else model.prepare_s)) * self._chance.slowness()
        self._work(body, 1, seconds, self._chance.start_crash(), BodyReady(body.worker))

    def _run(self, action: Run) -> None:
        body = self._bodies.get(action.worker)
        if body is None:
            # Its end is on the way to the mind.
            return
        model, spec = body.function.model, body.function.spec
        batch = len(action.requests)
        seconds = self._run_s.get((model.name, batch)) or latency_s(model, batch)
        self._run_s[model.name, batch] = seconds
        if model.jitter:
            seconds *= max(0.1, self._jitter.gauss(1.0, model.jitter))
        self._work(body, spec.settings.threads, seconds, self._chance.run_crash(), RunEnded(body.worker, action.run))

    def _work(self, body: ModelledBody, cores: int, seconds: float, crash: float | None, event: Event) -> None:
        """Keep cores busy; `event` follows, or the body's death after the share `crash` of the time."""
        if crash is None:
            done = partial(self._turn, event)
        else:
            seconds *= crash
            done = partial(self._exit, body.worker, "WorkerError", "crashed by a fault")
        body.job = Job(cores, seconds, done)
        self._cores.submit(body.job)

    def _exit(self, worker: WorkerId, error: str, reason: str, seconds: float = 0.0, lost_blocks: bool = False) -> None:
        """A body's process ends, and the mind hears of it; one that has ended already does not end again."""
        body = self._bodies.pop(worker, None)
        if body is None:
            return
        self._post(seconds, BodyExited(worker, error, reason, lost_blocks))
        if body.job is not None:
            self._cores.cancel(body.job)

    # Zygotes

    def _await_zygote_death(self) -> None:
        life = self._chance.zygote_life_s()
        if life is not None and self._timeline.now + life < self._scenario.duration_s:
            self._timeline.after(life, self._zygote_dies)

    def _zygote_dies(self) -> None:
        self._prepared.clear()
        self._zygote.closed_until(self._timeline.now + self._machine.zygote_start_s)
        for worker in list(self._bodies):
            self._exit(worker, "WorkerError", "its zygote died")
        self._turn(ZygoteLost())
        self._await_zygote_death()

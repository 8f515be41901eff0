"""A worker that computes more than its runs allow gets idle priority; computation outside runs is billed, and a worker
that does not end it is stopped.
"""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overwinter.core.actions import Bind, Run, StartWorker
from overwinter.core.events import Alarm, Arrived, Bound, Demoted, Deployed, WorkerReady
from overwinter.node import clock, overuse
from overwinter.node.cgroups import IDLE_SUFFIX
from overwinter.node.overuse import CHECK_INTERVAL_S, IDLE_CHECK_EVERY, OveruseCheck
from overwinter.node.threads import Threads, default_count
from overwinter.store.usage import UsageFile
from overwinter.telemetry.metering import Meter
from overwinter.telemetry.statistics import Statistics
from tests.node.rig import START_S, AddOne, Function, until
from tests.node.test_cgroups import cpu_group_of, is_idle
from tests.scheduler.world import spec

SPINS = """
import threading

def spin():
    while True:
        pass

def setup(assets):
    threading.Thread(target=spin, daemon=True).start()
"""
SLOW = """
import time

def preprocess(inputs, state):
    gate = inputs["x"]
    for step in (1.0, 2.0, 0.0):
        until = time.process_time() + 0.25
        while time.process_time() < until:
            pass
        while gate[0, 0] < step:
            time.sleep(0.001)
    return inputs
"""
"""It computes, and again after each of two steps. Its inputs lie in the buffer, where the test changes them."""
X = {"x": torch.zeros(2, 4)}
BOUND_S = 0.1
DEMOTED_RUN_S = 240.0
UPKEEP = Threads(1, "upkeep")


def test_threads_that_a_handler_leaves_running_are_billed_and_end_their_worker(rig, tmp_path):
    statistics, said = Statistics(), []
    overuse = OveruseCheck(statistics, rig.processes, UPKEEP, [].append, said.append, BOUND_S)

    async def started(handler):
        worker = await rig.start_worker(Function(AddOne(), X, handler))
        name = "spins" if handler else "rests"
        start = StartWorker(worker.worker, f"{name}@1", False, 1, 1)
        statistics.observe(0.0, Deployed(spec(name), resident=True), [start])
        statistics.observe(0.0, WorkerReady(worker.worker), [])
        return worker

    async def both():
        rests, spins = await started(None), await started(SPINS)
        overuse.check(1.0)
        before = clock.cpu_time_s(spins.pid)
        await until(lambda: clock.cpu_time_s(spins.pid) > before + 3 * BOUND_S)
        overuse.check(1.0 + BOUND_S)
        await until(lambda: rig.exits(spins.worker))
        return rests, spins

    rests, spins = rig.run(both())
    assert "outside its runs" in rig.exits(spins.worker)[0].reason
    assert not rig.exits(rests.worker)
    assert any("spins@1 is stopped" in line for line in said)
    assert [result.what for result in statistics.tallies["spins"].decisions] == ["stop"]
    with closing(UsageFile(tmp_path / "usage.sqlite")) as usage_file:
        rested, spun = Meter(statistics, usage_file, said.append).usage(None, 2.0, 2.0)
    assert (rested.function, spun.function) == ("rests", "spins")
    assert spun.core_ms >= 2 * BOUND_S * 1e3
    assert rested.core_ms == 0.0


@pytest.fixture(params=["groups", "no groups"])
def machine(request):
    """Return a node's processes, with and without control groups of the system."""
    made = request.getfixturevalue("rig" if request.param == "groups" else "ungrouped")
    if request.param == "groups" and not made.processes.zygotes.groups.shares_cores:
        pytest.skip("the system gives no control groups")
    return made


class Scene:
    """Workers that are checked as by the node, at times that the test defines."""

    def __init__(self, rig):
        self.rig = rig
        self.statistics, self.posted = Statistics(), []
        self.overuse = OveruseCheck(self.statistics, rig.processes, UPKEEP, self.posted.append, [].append)

    async def start(self, handler, ready=True):
        worker = await self.rig.start_worker(Function(AddOne(), X, handler))
        self.statistics.observe(
            0.0, Deployed(spec("f"), resident=True), [StartWorker(worker.worker, "f@1", False, 1, 1)]
        )
        if ready:
            self.statistics.observe(0.0, WorkerReady(worker.worker), [])
        return worker

    async def compute(self, worker):
        """Let the worker compute for a while."""
        before = clock.cpu_time_s(worker.pid)
        await until(lambda: clock.cpu_time_s(worker.pid) > before + 0.2)

    def counted(self, monkeypatch):
        """Return a function that adds CPU seconds to those that the checks find for a worker: exactly these."""
        spent_s = Counter()
        monkeypatch.setattr(overuse, "clock", SimpleNamespace(cpu_time_s=spent_s.__getitem__))
        return lambda worker, seconds=0.2: spent_s.update({worker.pid: seconds})

    async def check(self, now):
        found = self.overuse.check(now)
        for worker in found:
            await self.overuse.demote(worker)
        return found

    def gets_only_idle_cores(self, worker):
        if self.rig.processes.zygotes.groups.shares_cores:
            return IDLE_SUFFIX in Path(f"/proc/{worker.pid}/cgroup").read_text()
        threads = [int(name) for name in os.listdir(f"/proc/{worker.pid}/task")]
        return all(os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in threads)

    def decisions(self):
        return [result.what for result in self.statistics.tallies["f"].decisions]


def test_a_worker_that_computes_outside_runs_is_demoted_and_reported_once(machine):
    scene = Scene(machine)

    async def act():
        worker = await scene.start(SPINS)
        assert await scene.check(1.0) == []
        assert not scene.gets_only_idle_cores(worker)
        await scene.compute(worker)
        assert await scene.check(1.25) == [worker]
        assert scene.gets_only_idle_cores(worker)
        assert scene.posted == []
        assert await scene.check(1.5) == await scene.check(1.75) == []
        assert scene.posted == [Demoted(worker.worker)]
        assert scene.decisions() == ["demote"]

    machine.run(act())


def test_a_worker_is_demoted_while_all_threads_of_requests_are_busy(machine):
    scene, free = Scene(machine), threading.Event()

    async def act():
        worker = await scene.start(SPINS)
        await scene.check(1.0)
        await scene.compute(worker)
        loop = asyncio.get_running_loop()
        busy = [loop.run_in_executor(None, free.wait) for _ in range(default_count())]
        try:
            async with asyncio.timeout(START_S):
                assert await scene.check(1.25) == [worker]
            assert scene.gets_only_idle_cores(worker)
        finally:
            free.set()
            await asyncio.wait(busy)

    machine.run(act())


@pytest.mark.timeout(2 * DEMOTED_RUN_S)
def test_a_long_run_is_demoted_and_ends_with_the_right_answer(machine):
    scene = Scene(machine)

    async def act():
        worker = await scene.start(SLOW)
        x = {"x": torch.ones(2, 4)}
        x["x"][0, 0] = 0.0
        await scene.check(0.5)
        before = clock.cpu_time_s(worker.pid)
        run = machine.begin(worker, **x)
        arrived = Arrived(run, "f", None, None)
        scene.statistics.observe(1.0, arrived, [Run(worker.worker, run, (run,))])
        await until(lambda: clock.cpu_time_s(worker.pid) > before + 0.2)
        # This is allowed: the expected time of a run is not known yet.
        assert await scene.check(1.9) == []
        before = clock.cpu_time_s(worker.pid)
        [slot] = worker.slots
        gate = torch.frombuffer(slot.inputs.map, dtype=torch.float32, count=1)
        gate.fill_(1.0)
        await until(lambda: clock.cpu_time_s(worker.pid) > before + 0.2)
        assert await scene.check(9.0) == [worker]
        assert scene.gets_only_idle_cores(worker)
        assert run not in machine.ends()
        gate.fill_(2.0)
        # This takes long where other processes compute all the time.
        await until(lambda: run in machine.ends(), DEMOTED_RUN_S)
        x["x"][0, 0] = 2.0
        assert torch.equal(machine.output(run), x["x"] + 1.0)
        # The time was a run's, and is billed as run time.
        assert scene.statistics.tallies["f"].background_core_s == 0.0

    machine.run(act())


def wait_until(holds):
    """Wait without giving control to the event loop."""
    while not holds():
        time.sleep(0.001)


@pytest.mark.parametrize("when", ["after", "during"])
def test_a_demoted_worker_gets_its_cpu_weight_back_when_it_is_stopped(rig, when):
    scene, groups = Scene(rig), rig.processes.zygotes.groups
    if not groups.shares_cores:
        pytest.skip("the system gives no control groups")

    async def act():
        worker = await scene.start(SPINS)
        demoting = asyncio.ensure_future(scene.overuse.demote(worker))
        if when == "after":
            await demoting
        else:
            await asyncio.sleep(0)
            wait_until(lambda: scene.gets_only_idle_cores(worker))
        place = groups._tenants_parent.parent / cpu_group_of(worker.pid)
        assert is_idle(place)
        # It would not stop by itself before the cores are idle, so it is killed.
        rig.processes.stop(worker.worker, kill=when == "during")
        await demoting
        assert not is_idle(place)
        await until(lambda: rig.exits(worker.worker))
        assert "signal 9" in rig.exits(worker.worker)[0].reason

    rig.run(act())


def test_computation_outside_runs_is_found_after_an_idle_time(rig):
    scene = Scene(rig)

    async def act():
        worker = await scene.start(SPINS)
        # A stopped process computes nothing, so the checks find the worker idle.
        os.kill(worker.pid, signal.SIGSTOP)
        assert [await scene.check(at) for at in (1.0, 2.0, 3.0, 4.0, 5.0)] == [[]] * 5
        os.kill(worker.pid, signal.SIGCONT)
        for _ in range(3):
            await scene.compute(worker)
        assert worker in [
            each for number in range(IDLE_CHECK_EVERY) for each in await scene.check(5.25 + number * CHECK_INTERVAL_S)
        ]

    rig.run(act())


def test_a_run_that_only_waits_is_not_demoted(rig):
    scene = Scene(rig)

    async def act():
        worker = await scene.start(None)
        arrived = Arrived(1, "f", None, None)
        scene.statistics.observe(1.0, arrived, [Run(worker.worker, 1, (1,))])
        assert [await scene.check(now) for now in (1.0, 5.0, 9.0)] == [[], [], []]

    rig.run(act())


def test_a_worker_whose_runs_usually_take_long_is_demoted_later(rig, monkeypatch):
    scene = Scene(rig)
    compute = scene.counted(monkeypatch)

    async def act():
        worker = await scene.start(None)
        scene.statistics.tallies["f"].usual_run_s = 0.3
        arrived = Arrived(1, "f", None, None)
        scene.statistics.observe(1.0, arrived, [Run(worker.worker, 1, (1,))])
        await scene.check(1.0)
        compute(worker)
        assert await scene.check(2.1) == []
        # It should have ended, but other processes used the core.
        compute(worker)
        assert await scene.check(12.0) == []
        compute(worker, 1.2)
        assert await scene.check(13.0) == [worker]

    rig.run(act())


@pytest.mark.parametrize(
    ("functions", "usual"),
    [(("f@1",), {"f": 0.3}), (("f@1",) * 4, {"f": 0.075}), (("f@1", "g@1"), {"f": 0.03, "g": 0.0375})],
)
def test_the_usual_time_of_a_run_grows_with_its_requests(rig, monkeypatch, functions, usual):
    """All of these usually take 0.3 s, the last one with the verification of its split."""
    scene = Scene(rig)
    compute = scene.counted(monkeypatch)

    async def act():
        worker = await scene.start(None)
        scene.statistics.observe(0.0, Deployed(spec("g"), resident=True), [Bind(worker.worker, "g@1", 1)])
        scene.statistics.observe(0.0, Bound(worker.worker, "g@1", 1), [])
        for name, seconds in usual.items():
            scene.statistics.tallies[name].usual_request_s = seconds
        for request, function in enumerate(functions, 1):
            scene.statistics.observe(1.0, Arrived(request, function.partition("@")[0], None, None), [])
        run = Run(worker.worker, 1, tuple(range(1, len(functions) + 1)), None, functions)
        scene.statistics.observe(1.0, Alarm(), [run])
        await scene.check(1.0)
        # Where a run has several requests, this is more than four times the usual time of one.
        compute(worker, 0.4)
        assert await scene.check(2.1) == []
        compute(worker, 1.0)
        assert await scene.check(13.0) == [worker]

    rig.run(act())


def test_a_worker_that_loads_for_long_is_demoted_and_reported_as_demoted_when_it_is_ready(rig):
    scene = Scene(rig)

    async def act():
        worker = await scene.start(SPINS, ready=False)
        worker.ready = False
        for now in (0.5, 1.5):
            await scene.compute(worker)
            found = await scene.check(now)
        assert found == [worker]
        await scene.check(1.75)
        assert scene.posted == []
        worker.ready = True
        await scene.check(2.0)
        assert scene.posted == [Demoted(worker.worker)]

    rig.run(act())


def test_a_worker_whose_load_ends_between_two_checks_is_not_demoted(rig):
    scene = Scene(rig)

    async def act():
        worker = await scene.start(SPINS, ready=False)
        worker.ready = False
        await scene.check(0.25)
        await scene.compute(worker)
        worker.ready = True
        assert await scene.check(0.5) == []

    rig.run(act())

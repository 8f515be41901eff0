"""A function with a handler and `device = "any"`: its workers run each call of the program, or a device does."""

from random import Random

import pytest

from overwinter.core.actions import Refuse, Reply, RunOnDevice, StartExecutor
from overwinter.core.events import LoadAsked, UnloadAsked
from overwinter.scheduler.counterpart import RUN_BY_WORKER
from overwinter.scheduler.published import Published
from tests.scheduler.test_any_device import SIZE, profiled
from tests.scheduler.test_devices import device, of
from tests.scheduler.world import World, spec
from tests.telemetry.test_pool import Watched


class Node(Watched):
    """A world whose workers call the program in each run, and run it themselves in `cpu_s` if it is left to them."""

    def __init__(
        self, cpu_s=0.5, device_s=0.1, devices=1, is_profiled=True, cut=False, after_s=0.0, **settings
    ) -> None:
        """`after_s`: what the handler takes after the call."""
        super().__init__(devices=tuple(map(device, range(devices))))
        self.cpu_s, self.device_s, self.after_s = cpu_s, device_s, after_s
        self.called: dict[int, int] = {}
        """The run that waits for each call."""
        self.asked: set[int] = set()
        profile, blobs = profiled(cpu_s) if is_profiled else None, [(f"f{at}", SIZE // 2) for at in range(2)]
        self.deploy(spec("f", 1, blobs, device="any", has_handler=True, profile=profile, **settings), cut=cut)

    def call(self) -> None:
        """Let each run of the handler call the program."""
        self.settle_processes()
        for run in [each for each in self.running.values() if each.run not in self.asked]:
            self.asked.add(run.run)
            self.called[self.arrive("f:program", 1, caller=(run.worker, run.run))] = run.run
        self.settle_processes()

    def end(self) -> None:
        """Let all requests be answered."""
        while self.open:
            self.call()
            waits = {run for call, run in self.called.items() if call not in self.answers}
            ready = [each for each in self.running.values() if each.run not in waits]
            if ready:
                own = [call for call, run in self.called.items() if run == ready[0].run]
                program_s = self.cpu_s if isinstance(self.answers[own[0]], Refuse) else 0.0
                self.now += program_s + self.after_s
                self.finish_run(ready[0], program_s=program_s)
            elif self.devices.running:
                run = next(iter(self.devices.running.values()))
                self.now += max(run.missing_bytes / 1e6, self.device_s)
                self.finish_on_device()
            elif not self.starting and not self.loads:
                self.ring()

    def serve(self) -> str:
        """Let a request be answered; return where its program ran."""
        before, request = len(self.log), self.arrive()
        self.end()
        assert isinstance(self.answers[request], Reply)
        return "device" if any(isinstance(each, RunOnDevice) for each in self.log[before:]) else "worker"


def known(**options) -> Node:
    """A node on which a device has run the program; what a worker takes is known by then."""
    node = Node(**options)
    while node.serve() != "device":
        pass
    node.serve()
    return node


def test_the_worker_and_a_device_are_both_tried_the_worker_first():
    node = Node(is_profiled=False)
    assert [node.serve() for _ in range(2)] == ["worker", "device"]


def test_a_call_goes_where_it_is_answered_sooner():
    assert known(cpu_s=0.5, device_s=0.1).serve() == "device"
    node = known(cpu_s=0.05, device_s=0.1)
    assert node.serve() == "worker"
    assert "workers 50.0 ms" in node.state.functions["f@1"].estimates.text()


@pytest.mark.parametrize("is_profiled", [False, True])
@pytest.mark.parametrize(("cpu_s", "device_s"), [(0.5, 0.1), (0.1, 0.5)])
def test_the_time_of_the_handler_itself_does_not_affect_where_a_call_goes(cpu_s, device_s, is_profiled):
    node = known(cpu_s=cpu_s, device_s=device_s, is_profiled=is_profiled, after_s=3.0)
    node.arrive()
    node.settle_processes()
    node.now += 3.0
    node.call()
    call = max(node.called)
    is_left = cpu_s < device_s
    assert [run.requests for run in node.devices.running.values()] == ([] if is_left else [(call,)])
    assert (call in node.answers) == is_left
    node.end()


def test_runs_whose_program_ran_on_a_device_do_not_count_in_the_latency_of_workers():
    node = known(cpu_s=0.5, device_s=0.1)
    before = node.state.functions["f@1"].latency.run_s
    node.arrive()
    node.call()
    [run] = [run for worker in node.statistics.workers.values() for run in worker.runs.values()]
    assert run.at_full_concurrency
    node.finish_on_device()
    # Nor do they correct the profile.
    assert not run.at_full_concurrency
    node.end()
    assert node.state.functions["f@1"].latency.run_s == before


def waiting(node: Node) -> int:
    """Return a call that waits for a device behind another call."""
    for _ in range(2):
        node.arrive()
        node.call()
    [first, second] = list(node.called)[-2:]
    assert [run.requests for run in node.devices.running.values()] == [(first,)]
    assert list(node.state.functions["f:program@1"].queue) == [second]
    return second


def test_a_call_that_waits_for_a_device_that_hangs_is_left_to_its_worker():
    node = known(cpu_s=0.5, device_s=0.1, is_profiled=False, concurrency=2)
    call = waiting(node)
    while call not in node.answers:
        node.ring()
    assert (node.answers[call].error, node.answers[call].message) == RUN_BY_WORKER
    assert node.devices.running
    node.end()
    assert {type(each) for id_, each in node.answers.items() if id_ not in node.called} == {Reply}


def test_calls_whose_executor_dies_are_left_to_their_workers():
    node = known(cpu_s=0.5, device_s=0.1, is_profiled=False, concurrency=2)
    waiting(node)
    node.die(min(node.devices.executors))
    assert [node.answers[call].error for call in list(node.called)[-2:]] == [RUN_BY_WORKER[0]] * 2
    node.end()
    assert {type(each) for id_, each in node.answers.items() if id_ not in node.called} == {Reply}


@pytest.mark.parametrize("cut", [False, True])
def test_while_the_program_is_out_of_service_on_devices_the_worker_runs_it(cut):
    node = known(cut=cut, devices=2)
    node.state.functions["f:2@1" if cut else "f:program@1"].backoff_until = node.now + 60
    assert node.serve() == "worker"
    assert Published(node.scheduler.cycle).function("f@1", node.now).state == "awake"


def test_a_call_of_a_cut_program_runs_in_slices_on_devices():
    node = known(cut=True, devices=2, cpu_s=0.5, device_s=0.1)
    before = len(node.log)
    assert node.serve() == "device"
    assert [each.function for each in node.log[before:] if isinstance(each, RunOnDevice)] == ["f:program@1", "f:2@1"]


def test_a_call_from_no_known_run_such_as_a_trial_is_left_to_the_worker():
    node = Node()
    call = node.arrive("f:program", 1)
    assert node.answers[call].error == RUN_BY_WORKER[0]
    assert not of(node, StartExecutor)


def test_readers_see_one_function():
    node = known()
    published = Published(node.scheduler.cycle)
    assert "virtual:0" in published.detail("f@1", node.now).last_choice
    assert len(published.function("f@1", node.now).workers) == 1
    node.agree()
    requests = len(node.answers) - len(node.called)
    tally = node.statistics.tallies["f"]
    assert (tally.requests, tally.answered, tally.runs, sum(tally.refused.values())) == (requests,) * 3 + (0,)


def test_the_function_and_its_program_are_unloaded_as_one():
    node = known(cpu_s=0.5, device_s=0.1)
    node.arrive()
    node.call()
    node.manage(UnloadAsked("f@1"))
    late = node.arrive()
    assert node.answers[late].message == "function f@1 is unloaded; load it first"
    assert Published(node.scheduler.cycle).function("f@1", node.now).state == "unloaded"


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_requests_end(seed):
    chance = Random(seed)
    node = Node(devices=2, cut=seed % 2 == 1, concurrency=2, max_workers=2)
    for _ in range(250):
        node.now += chance.random() / 4
        while node.alarm is not None and node.alarm <= node.now:
            node.ring()
        may = [node.arrive] * 2 + [node.call] * 3
        may += [node.load_blocks] * 3 if node.loads else []
        may += [node.ready] * 3 if node.starting else []
        may += [node.finish_on_device] * 4 if node.devices.running else []
        may += [lambda: node.finish_on_device(unplaced=True)] if node.devices.running else []
        may += [lambda: node.finish_run(chance.choice(list(node.running.values())))] * 2 if node.running else []
        may += [node.die] if node.alive and chance.random() < 0.2 else []
        chance.choice(may)()
    node.end_well(["f"], 60.0)
    assert not node.open
    assert not node.state.requests


def test_a_handler_that_calls_no_program_uses_no_device():
    world = World(devices=(device(),))
    world.deploy(spec("f", 1, [("f0", SIZE)], device="any", has_handler=True))
    request = world.arrive()
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert not of(world, StartExecutor)


def test_a_call_does_not_wait_for_bytes_that_its_own_worker_uses():
    world = World(devices=(device(0), device(1)), host_bytes=1000)
    world.deploy(spec("f", 1, [("f0", 600)], device="any", has_handler=True, timeout_s=100.0, profile=profiled(0.5)))
    world.deploy(spec("g", 1, [("g0", 700)], device="pool", timeout_s=100.0))
    world.arrive("f")
    world.settle_processes()
    [run] = world.running.values()
    world.now += 1
    waiting = world.arrive("g")
    world.settle_processes()
    assert world.state.functions["g@1"].waits_in == "bytes"
    call = world.arrive("f:program", 1, caller=(run.worker, run.run))
    world.settle_processes()
    assert world.answers[call].message == RUN_BY_WORKER[1]
    world.settle()
    assert isinstance(world.answers[waiting], Reply)


def test_a_load_of_the_program_waits_for_bytes_in_the_host_store():
    world = World(devices=(device(),), host_bytes=1000)
    for name, nbytes in (("h", 900), ("g", 700)):
        world.deploy(spec(name, 1, [(f"{name}0", nbytes)], device="pool", timeout_s=100.0))
        world.arrive(name)
        world.settle_processes()
    world.deploy(spec("f", 1, [("f0", 600)], device="any", has_handler=True, profile=profiled(0.5)))
    world.send(LoadAsked("f:program@1"))
    program = world.state.functions["f:program@1"]
    assert (program.waits_in, program.wants_wake) == ("bytes", True)
    world.settle()
    assert program.loaded

"""A function with `device = "any"` whose program no device can hold: it runs in a worker, or in slices on devices."""

import pytest

from overwinter.core.actions import Reply, Run, RunOnDevice
from overwinter.core.events import LoadAsked, RunEnded, RunFailure, UnloadAsked
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.published import Published
from tests.scheduler.test_devices import device
from tests.scheduler.world import World, spec

SIZE = 600_000
PARTS = "f:program@1", "f:2@1", "f:3@1"


def cut(name="f", cpu_s=0.5, **settings):
    profile = Profile(weight_bytes=3 * SIZE, macs=100, points=(Point(1, 10, 1, 1, cpu_s),), wake_s=0.03)
    blobs = [(f"{name}{number}", SIZE) for number in range(3)]
    return spec(name, 1, blobs, device="any", profile=profile, **settings)


class Node(World):
    """A world with a cut function; its runs in workers and those of its slices on devices take these times."""

    def __init__(self, cpu_s=0.5, device_s=0.1, devices=3, **settings) -> None:
        super().__init__(devices=tuple(map(device, range(devices))))
        self.cpu_s, self.device_s = cpu_s, device_s
        self.deploy(cut(cpu_s=cpu_s, **settings), cut=True)

    def end(self) -> None:
        """Let all requests be answered. Devices work at the same time."""
        ends: dict[int, float] = {}
        while self.open:
            self.settle_processes()
            if running := self.devices.running:
                for run in running.values():
                    ends.setdefault(run.run, self.now + max(run.missing_bytes / 1e6, self.device_s))
                run = min(running.values(), key=lambda each: ends[each.run])
                self.now = max(self.now, ends[run.run])
                self.send(self.devices.end(run, (), False))
            elif self.running:
                self.now += self.cpu_s
                self.finish()
            elif not self.starting and not self.loads:
                self.ring()


def known(**options) -> Node:
    """A node on which the slices have run."""
    world = Node(**options)
    for _ in range(2):
        world.arrive()
        world.end()
    return world


def runs(world: Node, since=0) -> list[str]:
    """Return where the requests ran: the parts on devices, and `workers`."""
    taken = [each for each in world.log[since:] if isinstance(each, Run | RunOnDevice) and each.requests]
    return ["workers" if isinstance(each, Run) else each.function for each in taken]


def asked(world: Node) -> list[str]:
    before = len(world.log)
    request = world.arrive()
    world.end()
    assert isinstance(world.answers[request], Reply)
    assert world.answers[request].function == "f@1"
    return runs(world, before)


def estimates(world: Node) -> str:
    return world.state.functions["f@1"].estimates.text()


def test_a_cut_function_runs_where_its_request_is_answered_sooner():
    world = known(cpu_s=0.5, device_s=0.1)
    assert asked(world) == list(PARTS)
    assert "300.0 ms (0.0 until it runs); workers 530.0 ms" in estimates(world)
    assert asked(known(cpu_s=0.1, device_s=0.1)) == ["workers"]


def test_slices_that_were_never_measured_are_tried_first():
    world = Node(cpu_s=0.01, devices=2)
    assert asked(world) == list(PARTS)
    assert asked(world) == ["workers"]


@pytest.mark.parametrize("lost", range(3))
def test_missing_blocks_of_each_slice_are_part_of_the_estimate(lost):
    world = known(cpu_s=0.4, device_s=0.1)
    assert asked(world) == list(PARTS)
    [there] = world.state.pool.holders(world.state.functions[PARTS[lost]])
    world.deploy(spec("g", 1, [("g-weights", 1_000_000)], device="pool"))
    for each in world.state.pool.devices.values():
        if each is not there:
            each.residents[next(iter(each.residents))].used_at = world.now
    world.arrive("g")
    world.end()
    gone = [part for part in PARTS if not any(True for _ in world.state.pool.holders(world.state.functions[part]))]
    assert len(gone) == 1
    assert asked(world) == ["workers"]
    assert "(30.0 until it runs)" in estimates(world)


def test_with_fewer_devices_than_slices_the_transfers_of_evicted_slices_are_part_of_the_estimate():
    world = known(cpu_s=10.0, device_s=0.1, devices=2)
    for _ in range(6):
        before = len(world.log)
        assert asked(world) == list(PARTS)
        found = world.state.functions["f@1"].estimates.devices
        moved = sum(each.missing_bytes for each in world.log[before:] if isinstance(each, RunOnDevice))
        # A request waits for the transfers, of which the three runs of 0.1 s hide a part.
        assert moved
        assert found.wait_s + found.run_s == pytest.approx(moved / 1e6, abs=0.31)


def test_all_slices_of_waiting_requests_are_part_of_the_estimate():
    world = known(cpu_s=10.0, device_s=0.1)
    for _ in range(7):
        world.arrive()
    assert len(world.state.functions["f:program@1"].queue) == 6
    world.arrive()
    # Six wait for three devices, behind a run of 0.1 s, and each needs runs of 0.3 s in all.
    assert world.state.functions["f@1"].estimates.devices.wait_s == pytest.approx(0.1 + 6 * 0.3 / 3)


def second_slice(world: Node) -> int:
    """Let a request reach the second slice of its program, and return it."""
    request = world.arrive()
    world.settle_processes()
    assert [run.function for run in world.devices.running.values()] == ["f:program@1"]
    world.finish_on_device()
    assert [run.requests for run in world.devices.running.values()] == [(request,)]
    return request


def pass_on(world: Node, request: int) -> None:
    """Let the run of a request in a slice end."""
    [run] = [each for each in world.devices.running.values() if request in each.requests]
    world.send(world.devices.end(run, (), False))


def test_requests_in_later_slices_count_against_the_queue_limit():
    world = known(cpu_s=5.0, devices=2, queue_limit=2)
    second_slice(world)
    behind = world.arrive()
    pass_on(world, behind)
    running, waiting = world.arrive(), world.arrive()
    assert [list(world.state.functions[part].queue) for part in PARTS] == [[waiting], [behind], []]
    assert running in world.open
    refused = world.answers[world.arrive()]
    assert (refused.error, refused.message) == ("OverloadedError", "function f@1 already has 2 requests waiting")


def test_a_request_too_large_for_a_later_slice_begins_anew_in_a_worker():
    world = known()
    before = len(world.log)
    request = second_slice(world)
    [run] = world.devices.running.values()
    del world.devices.running[run.run]
    world.send(RunEnded(run.executor, run.run, (RunFailure(request, "ActivationsError", "too large"),)))
    world.end()
    assert isinstance(world.answers[request], Reply)
    assert runs(world, before) == ["f:program@1", "f:2@1", "workers"]


def test_a_request_whose_executors_die_begins_anew_in_a_worker():
    world = known()
    before = len(world.log)
    request = second_slice(world)
    [busy] = [run.executor for run in world.devices.running.values()]
    for executor in sorted(world.devices.executors, key=lambda each: each == busy):
        world.die(executor)
    world.end()
    assert isinstance(world.answers[request], Reply)
    assert runs(world, before) == ["f:program@1", "f:2@1", "workers"]


def test_a_request_behind_a_slice_that_hangs_begins_anew_in_a_free_worker():
    world = known(cpu_s=5.0, device_s=0.1, devices=2)
    world.send(LoadAsked("f@1"))
    world.settle_processes()
    hanging = second_slice(world)
    second = world.arrive()
    third = world.arrive(due=world.now + 1.0)
    pass_on(world, second)
    assert [each.requests for each in world.devices.running.values()] == [(hanging,), (third,)]
    assert list(world.state.functions["f:2@1"].queue) == [second]
    while not world.running:
        world.ring()
    assert [each.requests for each in world.running.values()] == [(second,)]
    world.end()
    assert {type(world.answers[each]) for each in (hanging, second, third)} == {Reply}


@pytest.mark.parametrize("part", PARTS)
def test_if_one_slice_is_out_of_service_workers_serve_the_function(part):
    world = known(cpu_s=0.5, device_s=0.1)
    world.state.functions[part].backoff_until = world.now + 60
    assert asked(world) == ["workers"]


def test_a_cut_function_is_unloaded_as_one():
    world = known()
    request = second_slice(world)
    world.manage(UnloadAsked("f@1"))
    late = world.arrive()
    world.settle()
    assert [world.answers[each].message for each in (request, late)] == [
        "function f@1 is unloaded; load it first",
        "function f@1 is unloaded; load it first",
    ]
    assert Published(world.scheduler.cycle).function("f@1", world.now).state == "unloaded"
    for id_ in ("f@1", *PARTS):
        world.send(LoadAsked(id_))
    world.settle()
    assert Published(world.scheduler.cycle).function("f@1", world.now).state == "awake"


def test_readers_see_one_function_with_its_slices():
    world = known()
    published = Published(world.scheduler.cycle)
    assert published.families() == {("t", "f"): "f@1"}
    detail = published.detail("f@1", world.now)
    assert [len(detail.pool.slices), detail.pool.run_s] == [3, pytest.approx(0.3)]

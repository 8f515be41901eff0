"""One tenant's workers never exclude another's: max-min fairness, even if runs never end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from overwinter.core.actions import Reply, StopWorker
from overwinter.core.events import Cancelled, HostCapacityMeasured, LoadAsked, UnloadAsked
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.operations import ENDED_MAX
from overwinter.scheduler.order import FREE_ONE_IN
from tests.scheduler.test_properties import TIMEOUT_S, AnyOrder
from tests.scheduler.world import World, spec

DAY_S = 86_400.0
DRAIN_TIMEOUT_S = 30.0


def sleepers(world: World, count: int, tenant="a") -> None:
    """Deploy functions whose handlers never answer, with one request each."""
    for number in range(count):
        name = f"{tenant}{number}"
        world.deploy(spec(name, blobs=((name, 1),), has_handler=True, tenant=tenant, timeout_s=DAY_S))
        world.arrive(name)
    world.settle_processes()


def well(world: World, name="b", **changes):
    """Deploy a function that answers its requests, by default of a tenant of the same name."""
    made = {"blobs": ((name, 1),), "tenant": name, "timeout_s": 100.0} | changes
    world.deploy(spec(name, **made))


def workers_of(world: World, tenant: str) -> int:
    return sum(worker.tenant == tenant for worker in world.state.workers.values())


def finish(world: World, name: str) -> None:
    """Complete the runs of one function, and all starts and binds, but not the runs of the sleepers."""
    finish_runs(world, name)
    world.settle_processes()


def finish_runs(world: World, name: str) -> None:
    """Complete the runs of one function."""
    workers = world.state.workers
    for run in [run for run in world.running.values() if workers[run.worker].function == f"{name}@1"]:
        world.running = {run.run: run} | world.running
        world.finish()


def answered(world: World, name: str) -> Reply | None:
    """Return the answer to a new request, if there is one."""
    request = world.arrive(name)
    for _ in range(3):
        world.settle_processes()
        finish(world, name)
    return world.answers.get(request)


def test_one_tenant_alone_may_have_every_worker():
    world = World(workers_max=32)
    sleepers(world, 40)
    assert workers_of(world, "a") == 32


def test_a_part_of_the_workers_is_kept_for_other_tenants_as_soon_as_there_are_any():
    world = World(workers_max=32)
    well(world)
    sleepers(world, 40)
    assert workers_of(world, "a") == 32 - 32 // FREE_ONE_IN
    for _ in range(20):
        assert isinstance(answered(world, "b"), Reply)
        world.now += 1.0


def test_a_tenant_that_comes_later_gets_what_another_has_beyond_its_share():
    """All workers sleep for a day: one is killed at the drain timeout, and the new tenant keeps its capacity."""
    world = World(workers_max=8)
    sleepers(world, 20)
    well(world, keep_alive_s=1000.0)
    request = world.arrive("b")
    world.settle_processes()
    assert request not in world.answers
    while not any(isinstance(each, StopWorker) for each in world.log):
        world.ring()
    assert world.now <= DRAIN_TIMEOUT_S + 1.0
    killed = [each.worker for each in world.log if isinstance(each, StopWorker)]
    assert len(killed) == 1
    world.settle_processes()
    assert workers_of(world, "b") == 1
    for _ in range(50):
        assert isinstance(answered(world, "b"), Reply)
        world.now += 2.0
    assert isinstance(world.answers[request], Reply)
    assert [each.worker for each in world.log if isinstance(each, StopWorker)] == killed
    results = [each for each in world.answers.values() if not isinstance(each, Reply)]
    assert [(each.error, "another tenant" in each.message) for each in results] == [("OverloadedError", True)]


@pytest.mark.parametrize("hangs_in", ["start", "bind"])
def test_a_start_or_bind_that_hangs_is_ended_for_another_tenant(hangs_in):
    world = World(workers_max=2, start_timeout_s=500.0)
    for name in ("a0", "a1"):
        world.deploy(spec(name, blobs=((name, 1),), tenant="a", family=name, timeout_s=DAY_S))
        other = name.replace("a", "other")
        world.deploy(spec(other, blobs=((other, 1),), tenant="a", family=name, timeout_s=DAY_S))
        waiting = world.arrive(name)
        world.load_blocks()
        if hangs_in == "bind":
            world.ready()
            world.finish()
            waiting = world.arrive(other)
            world.load_blocks()
    assert len(world.binding) == (2 if hangs_in == "bind" else 0)
    well(world)
    request = world.arrive("b")
    world.load_blocks()
    began = world.now
    while not world.stopping:
        world.ring()
    assert began < world.now <= began + DRAIN_TIMEOUT_S + 1.0
    [killed] = world.stopping
    world.die(killed)
    [started] = [worker for worker, name in world.starting.items() if name == "b@1"]
    world.starting = {started: "b@1"} | world.starting
    world.ready()
    finish_runs(world, "b")
    assert isinstance(world.answers[request], Reply)
    # The other one continues, because no further tenant waits.
    assert not world.stopping
    assert waiting not in world.answers


def test_a_start_is_not_ended_while_only_its_own_tenant_waits_for_capacity():
    world = World(workers_max=1, start_timeout_s=500.0)
    for name in ("a0", "a1"):
        world.deploy(spec(name, blobs=((name, 1),), tenant="a", timeout_s=DAY_S))
        world.arrive(name)
        world.load_blocks()
    while not world.stopping:
        world.ring()
    assert world.now >= 500.0


def test_a_tenant_that_unloads_and_loads_keeps_no_worker_that_another_waits_for():
    world = World(workers_max=2)
    sleepers(world, 2)
    well(world)
    request = world.arrive("b")
    world.settle_processes()
    while request not in world.answers and world.now < 3 * DRAIN_TIMEOUT_S:
        for name in ("a0@1", "a1@1"):
            world.send(UnloadAsked(name))
            world.send(LoadAsked(name))
        if world.alarm is not None and world.alarm <= world.now + 5.0:
            world.ring()
        else:
            world.now += 5.0
        world.settle_processes()
        finish(world, "b")
    assert isinstance(world.answers.get(request), Reply)


def test_a_worker_whose_function_is_loaded_again_is_not_kept_while_another_tenant_waits():
    world = World(workers_max=2)
    sleepers(world, 2)
    began = world.now
    world.send(UnloadAsked("a0@1"))
    well(world)
    request = world.arrive("b")
    world.settle_processes()
    world.now += DRAIN_TIMEOUT_S - 1.0
    world.send(LoadAsked("a0@1"))
    while not world.stopping:
        world.ring()
    assert world.now <= began + DRAIN_TIMEOUT_S
    world.settle_processes()
    finish(world, "b")
    assert isinstance(world.answers[request], Reply)


def test_an_idle_worker_beyond_a_tenants_share_is_stopped_and_a_tenant_with_fewer_keeps_its_worker():
    world = World(workers_max=4)
    for name in ("a1", "a2", "a3"):
        world.deploy(spec(name, blobs=((name, 1),), tenant="a", keep_alive_s=1000.0))
    well(world, "b", keep_alive_s=1000.0)
    for name in ("b", "a1", "a2", "a3"):
        world.arrive(name)
        world.settle()
    well(world, "c")
    world.arrive("c")
    world.settle()
    assert [workers_of(world, tenant) for tenant in "abc"] == [2, 1, 1]


def test_a_worker_is_ended_for_a_tenant_that_lacks_the_memory_for_a_worker():
    world = World(memory_bytes=100 << 20, workers_max=32)
    sleepers(world, 10)
    assert workers_of(world, "a") == 6
    well(world, keep_alive_s=1000.0)
    request = world.arrive("b")
    while request not in world.answers:
        world.settle_processes()
        finish(world, "b")
        if request not in world.answers:
            world.ring()
    assert isinstance(world.answers[request], Reply)
    assert world.now <= DRAIN_TIMEOUT_S + 1.0


def test_an_idle_worker_is_stopped_as_soon_as_the_less_valuable_one_is_wanted():
    """The less valuable worker is so large that its tenant would have less than the other without it."""
    world = World(memory_bytes=40, host_bytes=3)

    def deploy(name, tenant, nbytes, family="", block=""):
        profile = Profile(weight_bytes=1, macs=1, points=(Point(1, nbytes, 1, 1, 0.1),))
        world.deploy(spec(name, blobs=((block or name, 1),), profile=profile, tenant=tenant, family=family))

    for name, nbytes, family in (("large", 23, "one"), ("sibling", 23, "one"), ("small", 5, "")):
        deploy(name, "a", nbytes, family)
    for name in ("large", "small"):
        world.arrive(name)
        world.settle()
    deploy("busy", "b", 5)
    world.arrive("busy")
    world.settle_processes()
    deploy("waiting", "b", 8, block="busy")
    world.arrive("waiting")
    # The large worker will serve it when there is space for its blocks.
    world.arrive("sibling")
    assert not any(isinstance(each, StopWorker) for each in world.log)
    world.send(HostCapacityMeasured(4))
    assert [world.forked_for[each.worker] for each in world.log if isinstance(each, StopWorker)] == ["small@1"]
    world.settle_processes()
    assert workers_of(world, "b") == 2


def test_a_tenant_has_no_more_workers_than_its_limit():
    world = World(workers_max=32, tenant_workers_max=3)
    sleepers(world, 10)
    assert workers_of(world, "a") == 3
    well(world)
    assert isinstance(answered(world, "b"), Reply)


class Tenants(AnyOrder):
    """Random events among functions of several tenants."""

    @rule(name=st.sampled_from(["x", "y"]), has_handler=st.booleans(), profile=st.integers(0, 3))
    def deploy_for_others(self, name, has_handler, profile):
        version = self.versions.setdefault(name, 0) + 1
        self.versions[name] = version
        blobs = ((f"{name}{version}", 7),)
        made = spec(
            name,
            version,
            blobs,
            has_handler,
            self.profiles[profile],
            name,
            timeout_s=TIMEOUT_S,
            max_workers=3,
            slo_ms=500,
            max_batch=2,
        )
        self.world.deploy(made)

    @rule(name=st.sampled_from(["x", "y"]))
    def arrive_for_others(self, name):
        self.world.arrive(name)


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_is_forgotten_among_tenants(policy, most):
    machine = type("Tenants", (Tenants,), {"policy": policy, "bounds": {"tenant_workers_max": most}})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=50, deadline=None))


def test_one_tenant_s_waiting_requests_leave_room_for_another_s():
    world = World(requests_max=12, workers_max=2)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b", "b")):
        world.deploy(spec(name, blobs=((name, 1),), tenant=tenant, timeout_s=100.0))
    of_a = [world.arrive(name) for name in ("a1", "a2") * 5]
    refused = [world.answers[request] for request in of_a if request in world.answers]
    assert len(of_a) - len(refused) == 6
    assert {(each.error, "requests_max" in each.message) for each in refused} == {("OverloadedError", True)}
    of_b = [world.arrive("b") for _ in range(3)]
    world.settle()
    assert all(isinstance(world.answers[request], Reply) for request in of_b)
    assert isinstance(answered(world, "a1"), Reply)


def test_ended_time_slices_of_workers_are_forgotten():
    world = World(cores=4, workers_max=2)
    for name in "fgh":
        world.deploy(spec(name, blobs=((name, 10),), max_workers=1))
    for number in range(60):
        world.arrive("fgh"[number % 3])
        world.settle()
        world.now += 1.0
    tenant = world.state.tenants["t"]
    assert world.resources.workers.of("t") <= 2
    assert len(tenant.time_slice_ends) <= 2 * 2 + ENDED_MAX


def test_an_idle_worker_whose_family_waits_for_a_batch_is_stopped_for_another_tenant():
    points = Point(1, 8, 1, 1, 0.1), Point(1, 8, 4, 1, 0.12)
    made = Profile(weight_bytes=15, macs=100, points=points)
    world = World(cores=8, workers_max=1, drain_timeout_s=DRAIN_TIMEOUT_S)
    for name in "fb":
        blobs = (("shared", 10), (f"own-of-{name}", 5))
        own = {"slo_ms": DAY_S * 1000, "timeout_s": DAY_S, "max_batch": 4, "max_workers": 1, "family": "one"}
        world.deploy(spec(name, 1, blobs, profile=made, **own))
    well(world, "g", timeout_s=600.0)

    def run_all() -> None:
        while world.loads or world.starting or world.binding or world.running:
            world.settle_processes()
            if world.running:
                world.finish()

    first = world.arrive("b")
    while first not in world.answers:
        run_all()
        if first not in world.answers:
            world.ring()
    # So many requests that the workers do not keep up; their callers leave.
    for _ in range(300):
        leaving = world.arrive("f")
        world.send(Cancelled(leaving))
        world.now += 0.01
    run_all()
    check_at = world.state.functions["f@1"].family.check_at
    while world.alarm <= check_at:
        world.ring()
        run_all()
    waits = world.arrive("b")
    run_all()
    assert waits not in world.answers
    [worker] = world.state.workers.values()
    assert worker.is_idle
    assert answered_within(world, "g", 2 * DRAIN_TIMEOUT_S)


def answered_within(world: World, name: str, seconds: float) -> bool:
    """Whether a new request is answered in this time; no run of other functions ends."""
    request, began = world.arrive(name), world.now
    while request not in world.answers and world.now <= began + seconds:
        world.settle_processes()
        finish_runs(world, name)
        if request not in world.answers and not (world.stopping or world.loads or world.starting):
            world.ring()
    return isinstance(world.answers.get(request), Reply) and world.now <= began + seconds


@pytest.mark.parametrize("waits", [False, True])
def test_blocks_are_freed_for_another_tenant_within_three_drain_timeouts_whoever_waits_first(waits):
    world = World(cores=8, host_bytes=100, drain_timeout_s=DRAIN_TIMEOUT_S)
    for name, tenant in (("f", "t"), ("h", "t"), ("g", "u")):
        own = {"tenant": tenant, "timeout_s": DAY_S, "has_handler": tenant == "t"}
        world.deploy(spec(name, 1, ((name, 80),), **own))
    world.arrive("f")
    world.settle_processes()
    world.now = 60.0
    if waits:
        world.arrive("h")
    world.now += 1.0
    assert answered_within(world, "g", 3 * DRAIN_TIMEOUT_S)

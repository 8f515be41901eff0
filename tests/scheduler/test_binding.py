"""A bind claims the private memory that it is expected to add, and uses free memory or replaces another function."""

import sys
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.actions import Bind, Reply, StartWorker, StopWorker, Unbind
from overwinter.core.events import MemoryMeasured
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from tests.scheduler.world import World, spec

MIB = 1 << 20
NEED = 10 * MIB
STATE = 3 * MIB
"""The memory that each bound member takes in a worker."""
PROFILE = Profile(weight_bytes=10, macs=100, points=tuple(Point(1, NEED, 1, runs, 0.1) for runs in (1, 2)))
NAMES = "fghij"


def node(mib, policy="overwinter", others="", **own) -> World:
    """Return a world with members of one family and other functions, with this much private memory for all workers."""
    world = World(memory_bytes=mib * MIB, cores=4, policy=policy)
    own = {"profile": PROFILE, "max_workers": 4, "concurrency": 2} | own
    for name in NAMES:
        world.deploy(spec(name, blobs=(("shared", 10), (name, 5)), family="one", **own))
    for name in others:
        world.deploy(spec(name, blobs=((name, 10),), **own))
    return world


def use(world: World, *names: str) -> None:
    for name in names:
        world.now += 0.1
        request = world.arrive(name)
        world.settle()
        assert isinstance(world.answers[request], Reply)


def true_bytes(world: World, worker: int) -> int:
    return NEED + (len(world.bound[worker]) * STATE if world.forked_for[worker][0] in NAMES + "klm" else 0)


def measure(world: World) -> list:
    return world.send(MemoryMeasured(tuple((worker, true_bytes(world, worker)) for worker in sorted(world.alive))))


def of(kind, actions) -> list:
    return [action for action in actions if isinstance(action, kind)]


def test_a_bind_claims_what_each_member_of_its_family_takes_until_that_is_measured():
    world = node(100)
    use(world, "f")
    measure(world)
    before = world.resources.memory.taken
    assert before == NEED + STATE
    world.arrive("g")
    world.load_blocks()
    assert world.binding
    assert world.resources.memory.taken == before + STATE
    world.settle()
    assert world.resources.memory.taken == before + STATE
    measure(world)
    assert world.resources.memory.taken == true_bytes(world, 1)
    world.send(MemoryMeasured(((1, NEED + 4 * MIB),)))
    assert world.resources.memory.taken == NEED + 4 * MIB


def test_a_bind_in_progress_is_still_claimed_when_its_worker_is_measured():
    world = node(100)
    use(world, "f")
    measure(world)
    world.arrive("g")
    world.load_blocks()
    measure(world)
    assert world.binding
    assert world.resources.memory.taken == NEED + 2 * STATE


def test_a_bind_for_which_there_is_no_room_takes_the_place_of_the_function_that_ran_longest_ago():
    world = node(18)
    for name in ("f", "g", "f"):
        use(world, name)
        measure(world)
    use(world, "h")
    assert of(Unbind, world.log) == [Unbind(1, "g@1")]
    assert world.resources.memory.taken == NEED + 2 * STATE
    assert len(of(StartWorker, world.log)) == 1
    assert world.bound == {1: {"f@1", "h@1"}}


def lacking() -> tuple[World, int]:
    """A request waits although a busy worker has a free slot, because there is no private memory for a bind."""
    world = node(14)
    use(world, "f")
    measure(world)
    world.arrive("f")
    request = world.arrive("g")
    world.settle_processes()
    assert not of(Bind, world.log)
    return world, request


def test_a_bind_waits_for_the_end_of_a_run_in_a_worker_with_room_for_one_function():
    world, request = lacking()
    world.finish()
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert world.bound == {1: {"g@1"}}


def test_an_idle_worker_is_stopped_so_that_the_next_bind_finds_room():
    world = node(26, others="x")
    use(world, "x", "f")
    measure(world)
    use(world, "g")
    [idle] = [id_ for id_, name in world.forked_for.items() if name == "x@1"]
    assert of(StopWorker, world.log) == []
    measure(world)
    use(world, "h")
    assert [stop.worker for stop in of(StopWorker, world.log)] == [idle]
    world.settle()
    use(world, "i", "j")
    assert len(of(Unbind, world.log)) == 1


def beside_a_run(mib: int, idle_mib: int) -> tuple[World, int]:
    """A request needs a bind in a busy worker, while a function outside its family has an idle worker."""
    world = node(mib)
    small = Profile(weight_bytes=10, macs=100, points=(Point(1, idle_mib * MIB, 1, 1, 0.1),))
    world.deploy(spec("x", blobs=(("x", 10),), profile=small))
    use(world, "x", "f")
    world.send(MemoryMeasured(((1, idle_mib * MIB), (2, NEED + STATE))))
    world.arrive("f")
    request = world.arrive("g")
    world.settle_processes()
    return world, request


def test_an_idle_worker_of_another_family_is_stopped_for_a_bind_in_a_worker_without_idle_functions():
    world, request = beside_a_run(NEED // MIB + 15, idle_mib=10)
    assert [stop.worker for stop in of(StopWorker, world.log)] == [1]
    assert world.bound[2] == {"f@1", "g@1"}
    assert [run.function for run in world.running.values()] == [None, "g@1"]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_no_worker_is_stopped_for_a_bind_that_would_still_not_fit():
    world, request = beside_a_run(15, idle_mib=1)
    assert not of(StopWorker, world.log)
    assert not of(Bind, world.log)
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_functions_behind_a_bind_that_fits_only_when_its_worker_is_idle_do_not_wait_for_it():
    """One of them needs a second worker, for which an idle worker of another function is stopped."""
    world = node(NEED // MIB + 5)
    small = Profile(weight_bytes=10, macs=100, points=(Point(1, MIB, 1, 1, 0.1),))
    for name in "xy":
        world.deploy(spec(name, blobs=((name, 10),), profile=small, max_workers=2))
    use(world, "y", "x", "f")
    world.send(MemoryMeasured(((1, MIB), (2, MIB), (3, NEED + STATE))))
    for name in "fxgx":
        world.arrive(name)
        world.settle_processes()
    assert [stop.worker for stop in of(StopWorker, world.log)] == [1]
    assert [start.function for start in of(StartWorker, world.log)] == ["y@1", "x@1", "f@1", "x@1"]
    assert not of(Bind, world.log)
    world.settle()
    assert {type(answer) for answer in world.answers.values()} == {Reply}


def calls(waiting: int) -> int:
    """Return the number of calls to handle a measurement while this many functions wait for private memory."""
    world = node(15)
    names = [f"w{number}" for number in range(waiting)]
    for name in names:
        world.deploy(spec(name, blobs=(("shared", 10), (name, 5)), family="one", profile=PROFILE, concurrency=2))
    use(world, "f")
    measure(world)
    for name in ("f", *names):
        world.arrive(name)
        world.settle_processes()
    assert not of(Bind, world.log)
    called = 0

    def count(frame, event, _what):
        # Count only the scheduler's own: the garbage collector may run here too, and hypothesis has callbacks in it.
        nonlocal called
        called += event == "call" and frame.f_globals["__name__"].startswith("overwinter.")

    event = MemoryMeasured(((1, NEED + STATE),))
    sys.setprofile(count)
    try:
        world.scheduler.handle(event, world.now)
    finally:
        sys.setprofile(None)
    return called


def test_not_all_functions_that_lack_private_memory_are_looked_at_whenever_capacity_changes():
    assert calls(waiting=40) == calls(waiting=20) > 0


def test_while_a_function_waits_for_capacity_a_bind_replaces_another_and_takes_no_free_memory():
    world = node(29, others="xy")
    use(world, "f", "g")
    measure(world)
    for name in "fx":
        world.arrive(name)
        world.settle_processes()
    world.arrive("y")
    world.load_blocks()
    assert world.state.functions["y@1"].waits_in == "capacity"
    assert world.resources.memory.free >= STATE
    request = world.arrive("h")
    while world.loads or world.binding:
        _ = world.load_blocks() if world.loads else world.bind()
    assert of(Unbind, world.log) == [Unbind(1, "g@1")]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def replacing() -> World:
    """A bind is in progress in place of the only function of its worker."""
    world = node(14)
    use(world, "f")
    measure(world)
    world.arrive("g")
    world.load_blocks()
    assert world.binding
    assert of(Unbind, world.log) == [Unbind(1, "f@1")]
    return world


def test_what_a_bind_adds_stays_claimed_when_what_it_replaces_is_measured_to_be_gone():
    world = replacing()
    measure(world)
    assert world.resources.memory.taken == NEED + STATE
    world.bind()
    assert world.resources.memory.taken == true_bytes(world, 1)


def test_a_worker_with_nothing_bound_tells_nothing_of_what_a_bind_adds():
    world = replacing()
    before = world.state.workers[1].family.bind_bytes
    measure(world)
    assert world.state.workers[1].family.bind_bytes == before == STATE


def test_a_function_that_lacked_private_memory_is_bound_when_a_measurement_shows_that_there_is_some():
    world, request = lacking()
    assert of(Bind, world.send(MemoryMeasured(((1, NEED),))))
    world.settle()
    assert isinstance(world.answers[request], Reply)


@settings(max_examples=60)
@given(
    policy=st.sampled_from([name for name, policy in POLICIES.items() if policy.binds]),
    mib=st.integers(20, 40),
    steps=st.lists(
        st.tuples(st.sampled_from([*NAMES, "x", "y"]), st.sampled_from("uuamfbs")), min_size=10, max_size=40
    ),
)
# Measured while a bind was in progress, and after the replaced function was unbound.
@example("overwinter", 20, [*[("f", "u")] * 4, ("f", "m"), ("x", "u"), ("g", "u"), ("f", "a"), ("f", "m"), ("h", "u")])
@example(
    "overwinter", 20, [*[("f", "u")] * 3, ("f", "m"), *((it, "u") for it in "ghi"), ("f", "a"), ("f", "m"), ("f", "u")]
)
# Memory that became free when a worker of a function outside the family ended.
@example("overwinter", 23, [*[("f", "u")] * 5, ("f", "m"), ("x", "u"), ("f", "a"), ("g", "a"), ("h", "u")])
def test_what_binds_add_was_claimed_before_and_fits(policy, mib, steps):
    """This holds once the worker was measured: before, what its first function takes beyond the need is unknown."""
    world = node(mib, policy, others="xy")
    for name, step in steps:
        world.now += 0.05
        if step in "ua":
            world.arrive(name)
        if step == "m":
            measure(world)
        elif step == "f" and world.running:
            world.finish()
        elif step == "b" and world.binding:
            world.bind()
        elif step == "s":
            world.settle_processes()
        elif step == "u":
            world.settle()
        for worker in world.state.workers.values():
            assert not worker.measured_bytes or worker.stopping or true_bytes(world, worker.id) <= worker.nbytes
    stopping = sum(worker.nbytes for worker in world.state.workers.values() if worker.stopping)
    assert world.resources.memory.taken - stopping <= mib * MIB
    world.calm()
    assert not world.open


WHOSE = {"t": "fghx", "u": "klmy", "v": "z"}
FAMILIES = {**dict.fromkeys("fgh", "one"), **dict.fromkeys("klm", "two")}
CROWD = "".join(WHOSE.values())


def crowded(chance: Random) -> World:
    """Return a world with families of two tenants, functions of three, and too little memory for all."""
    bounds = {"memory_bytes": chance.choice([15, 18, 24, 28, 33]) * MIB, "cores": chance.choice([None, 1, 2])}
    world = World(**bounds, workers_max=chance.choice([None, 2, 3]))
    for tenant, names in WHOSE.items():
        for name in names:
            own = {"profile": PROFILE, "concurrency": 2, "max_workers": 2, "timeout_s": 300.0, "tenant": tenant}
            world.deploy(spec(name, blobs=((tenant, 10), (name, 5)), family=FAMILIES.get(name, ""), **own))
    return world


def happens(world: World, chance: Random) -> None:
    """Send a random request, or let an operation in progress continue."""
    world.now += chance.choice([0.0, 0.05, 0.3])
    if world.alarm is not None and world.now >= world.alarm:
        world.ring()
    ways = {
        lambda: world.arrive(chance.choice(CROWD)): 8,
        lambda: measure(world): 2,
        world.settle_processes: 2,
        **({lambda: world.finish_run(chance.choice(list(world.running.values()))): 6} if world.running else {}),
        **({world.bind: 2} if world.binding else {}),
        **({lambda: world.die(min(world.stopping)): 2} if world.stopping else {}),
    }
    chance.choices(list(ways), list(ways.values()))[0]()


@pytest.mark.parametrize("seed", range(16))
def test_no_request_is_forgotten_where_binds_and_starts_lack_the_same_memory(seed):
    chance = Random(seed)
    world = crowded(chance)
    for _ in range(250):
        happens(world, chance)
    world.end_well(CROWD, soon_s=100.0)

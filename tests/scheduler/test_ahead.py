"""Workers forked ahead: for which tenants, when, which starts use them, and which are stopped first."""

import pytest

from overwinter.core.actions import Explanation, ForkAhead, StartWorker, StopWorker
from overwinter.core.events import MemoryPressure, Removed, ZygoteLost
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.ahead import CALM_S, KEEP_S, REFILL_S
from tests.scheduler.world import World, spec


def of(kind, actions) -> list:
    return [action for action in actions if isinstance(action, kind)]


def node(*functions, **config) -> World:
    world = World(**{"workers_ahead": 1, "cores": 4, **config})
    for function in functions:
        world.deploy(function)
    return world


def use(world, name="f") -> StartWorker | None:
    """Send a request and let it be answered; return the start of a worker for it, if any."""
    before = len(world.log)
    request = world.arrive(name)
    world.settle()
    assert type(world.answers[request]).__name__ == "Reply"
    return next(iter(of(StartWorker, world.log[before:])), None)


def ring_until(world, at) -> None:
    while world.alarm is not None and world.alarm <= at:
        world.ring()
        world.settle()
    world.now = at


def refill(world) -> None:
    ring_until(world, world.now + 2 * REFILL_S)


def idle_ends(world) -> None:
    """Let the keep-alive of idle workers end, but not that of workers forked ahead."""
    ring_until(world, world.now + 10)


def waiting(world) -> list[str]:
    """Return the functions for whose tenants a process waits."""
    return list(world.ahead.values())


def test_a_start_uses_the_process_that_was_forked_ahead_for_its_tenant():
    world = node(spec("f", keep_alive_s=1), spec("g", tenant="u", keep_alive_s=1))
    assert use(world).ahead is None
    refill(world)
    [forked] = world.ahead
    idle_ends(world)
    claimed = dict(world.scheduler.cycle.ledger.claims())
    resources = world.resources
    assert claimed["worker", forked] == {resources.workers: 1, resources.memory: 4 << 20, resources.runs: 1}
    before = len(world.log)
    start = use(world)
    assert start.ahead == forked
    assert start.worker != forked
    assert [each.function for each in of(Explanation, world.log[before:]) if each.what == "ahead"] == ["f@1"]
    # The next process is of the same tenant, and a start of another one does not use it.
    refill(world)
    assert waiting(world) == ["f@1"]
    assert use(world, "g").ahead is None


def test_nothing_is_forked_ahead_unless_that_is_asked_for():
    for wanted in (None, 0):
        world = node(spec("f"), workers_ahead=wanted)
        use(world)
        world.calm()
        assert not of(ForkAhead, world.log)


def test_a_start_of_a_program_that_the_forked_process_lacks_forks_a_worker_and_replaces_the_process():
    world = node(spec("f", keep_alive_s=1), spec("g"))
    use(world)
    refill(world)
    [first] = world.ahead
    assert use(world, "g").ahead is None
    refill(world)
    assert waiting(world) == ["g@1"]
    assert first not in world.alive
    idle_ends(world)
    assert use(world, "f").ahead is not None


def test_a_start_of_a_worker_for_concurrent_runs_uses_no_process_that_was_forked_ahead():
    world = node(spec("f", keep_alive_s=1, concurrency=2))
    use(world)
    refill(world)
    idle_ends(world)
    assert waiting(world)
    # The process has buffers for one run at a time.
    start = use(world)
    assert (start.concurrency, start.ahead) == (2, None)


def test_no_process_is_forked_ahead_while_cores_are_busy_or_right_after_a_start():
    world = node(spec("f"), spec("g"), cores=1)
    world.arrive("f")
    world.settle_processes()
    assert world.running
    world.arrive("g")
    world.settle_processes()
    for _ in range(4):
        world.ring()
    assert not world.ahead
    world.settle()
    assert not world.ahead
    refill(world)
    assert world.ahead


@pytest.mark.parametrize(("cores", "is_forked"), [(2, False), (3, True)])
def test_a_process_is_forked_ahead_beside_a_run_only_if_a_further_core_is_free(cores, is_forked):
    world = node(spec("f"), cores=cores)
    use(world)
    world.arrive("f")
    world.settle_processes()
    assert world.running
    end = world.now + 2 * REFILL_S
    while world.alarm is not None and world.alarm <= end:
        world.ring()
    assert bool(world.ahead or world.starting) == is_forked


def test_a_process_forked_ahead_counts_as_starting_until_it_waits_and_is_not_taken_over_before():
    world = node(spec("f", keep_alive_s=0), cores=2)
    use(world)
    while not world.starting:
        world.ring()
        if world.stopping:
            world.die(min(world.stopping))
    [forked] = world.starting
    assert world.resources.cores.taken == 1
    world.arrive("f")
    [start] = of(StartWorker, world.log)[1:]
    assert start.ahead is None
    world.settle()
    assert not world.resources.cores.taken
    assert forked in world.ahead


@pytest.mark.parametrize("bound", [{"workers_max": 2}, {"memory_bytes": 13 << 20}])
def test_what_is_forked_ahead_is_stopped_before_an_idle_worker(bound):
    """The process does not hold the program of the other function."""
    profile = Profile(weight_bytes=1, macs=1, points=(Point(1, 5 << 20, 1, 1, 0.1),))
    world = node(spec("f", profile=profile), spec("g", tenant="u", profile=profile), **bound)
    use(world)
    refill(world)
    assert waiting(world)
    before = len(world.log)
    [forked] = world.ahead
    use(world, "g")
    assert [each.worker for each in of(StopWorker, world.log[before:])] == [forked]
    assert {worker.function for worker in world.state.workers.values()} == {"f@1", "g@1"}


def test_a_start_that_lacks_memory_stops_an_idle_worker_and_not_the_process_that_it_uses():
    profile = Profile(weight_bytes=1, macs=1, points=(Point(1, 5 << 20, 1, 1, 0.1),))
    world = node(spec("f", profile=profile, keep_alive_s=1), spec("g", profile=profile), memory_bytes=9 << 20)
    use(world)
    refill(world)
    idle_ends(world)
    [forked] = world.ahead
    use(world, "g")
    [beside] = [id_ for id_, name in world.forked_for.items() if name == "g@1"]
    before = len(world.log)
    assert use(world).ahead == forked
    assert [each.worker for each in of(StopWorker, world.log[before:])] == [beside]


def test_a_start_uses_the_process_whose_claim_takes_all_capacity_for_workers():
    world = node(spec("f", keep_alive_s=1), workers_max=1)
    use(world)
    idle_ends(world)
    refill(world)
    ring_until(world, world.now + 20)
    assert waiting(world)
    assert use(world).ahead is not None


def test_a_dead_process_forked_ahead_is_replaced_after_longer_pauses_and_counts_against_no_function():
    world = node(spec("f", keep_alive_s=1))
    use(world)
    refill(world)
    pauses = []
    for _ in range(3):
        [forked] = world.ahead
        died_at = world.now
        world.die(forked)
        assert not world.ahead
        while not world.ahead:
            world.ring()
        pauses.append(world.now - died_at)
        world.settle()
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0] > 0
    function = world.state.functions["f@1"]
    assert (function.failures, function.backoff_until) == (0, 0)
    use(world)


def test_a_process_forked_ahead_that_dies_while_it_is_taken_over_counts_against_no_function():
    """Its exit is on the way when a start names it: the node then forks a worker, and the exit belongs to no
    function.
    """
    world = node(spec("f", keep_alive_s=1))
    use(world)
    refill(world)
    [forked] = world.ahead
    idle_ends(world)
    request = world.arrive("f")
    [*_, start] = of(StartWorker, world.log)
    assert start.ahead == forked
    world.die(forked)
    world.settle()
    assert type(world.answers[request]).__name__ == "Reply"
    assert world.state.functions["f@1"].failures == 0


@pytest.mark.parametrize("why", ["removed", "zygote", "unused"])
def test_an_unneeded_process_forked_ahead_is_stopped(why):
    world = node(spec("f", keep_alive_s=1))
    use(world)
    refill(world)
    [forked] = world.ahead
    if why == "removed":
        world.send(Removed("f@1"))
    elif why == "zygote":
        world.send(ZygoteLost("t"))
    else:
        ring_until(world, world.now + KEEP_S + 1)
    world.calm()
    assert forked not in world.alive
    assert not world.ahead
    assert not world.resources.workers.taken
    assert not world.resources.memory.taken


def test_a_starting_process_is_stopped_when_the_last_function_of_its_tenant_is_removed():
    world = node(spec("f", keep_alive_s=0))
    use(world)
    while not world.starting:
        world.ring()
        while world.stopping:
            world.die(min(world.stopping))
    [forked] = world.ahead
    world.send(Removed("f@1"))
    assert forked in world.stopping
    world.die(forked)
    assert not world.resources.cores.taken
    assert not world.state.tenants


def test_under_memory_pressure_a_process_forked_ahead_is_stopped_first_and_none_is_forked_for_a_while():
    world = node(spec("f"))
    use(world)
    refill(world)
    assert waiting(world)
    world.send(MemoryPressure(1))
    world.settle()
    assert not world.ahead
    assert [worker.is_idle for worker in world.state.workers.values()] == [True]
    ring_until(world, world.now + CALM_S / 2)
    assert not world.ahead
    ring_until(world, world.now + CALM_S)
    assert world.ahead


def test_a_tenant_has_at_most_two_processes_forked_ahead_and_no_more_than_programs_that_it_used():
    world = node(*(spec(name) for name in ("f", "g", "h")), spec("k", tenant="u"), workers_ahead=8)
    for name, most in {"f": 1, "g": 2, "h": 2, "k": 3}.items():
        use(world, name)
        for _ in range(4):
            refill(world)
        assert len(waiting(world)) == most


def test_each_of_many_tenants_has_one_process_forked_ahead():
    names = [f"f{number}" for number in range(5)]
    world = node(*(spec(name, tenant=f"of-{name}") for name in names), workers_ahead=8)
    for name in names:
        use(world, name)
    for _ in range(12):
        refill(world)
    assert sorted(waiting(world)) == [f"{name}@1" for name in names]


def test_the_number_of_processes_forked_ahead_is_divided_among_tenants():
    functions = [spec(name, tenant=f"of-{name}") for name in ("f", "g", "h")]
    world = node(*functions, spec("twin", tenant="of-f"), workers_ahead=2)
    use(world, "twin")
    use(world, "f")
    refill(world)
    ring_until(world, world.now + 1)
    # A single tenant may have all of them.
    assert waiting(world) == ["f@1", "f@1"]
    use(world, "g")
    refill(world)
    ring_until(world, world.now + 1)
    assert sorted(waiting(world)) == ["f@1", "g@1"]
    # A tenant that has just started a function keeps its process.
    use(world, "h")
    refill(world)
    ring_until(world, world.now + 1)
    assert sorted(waiting(world)) == ["f@1", "g@1"]

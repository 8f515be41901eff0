"""A snapshot has the content of the tables, and never changes, whatever happens while it is taken and afterwards."""

from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.events import Removed
from overwinter.scheduler import snapshot as module
from overwinter.scheduler.lifecycles import function_state, worker_state
from overwinter.scheduler.scheduler import Scheduler
from overwinter.scheduler.snapshot import FunctionSnapshot, Snapshot, snapshot
from tests.scheduler.replayed import play
from tests.scheduler.world import World, spec


def taken(scheduler: Scheduler, now: float, between=lambda: None, tenant=None) -> Snapshot:
    """Take all steps, with events between them."""
    steps = snapshot(scheduler.state, scheduler.resources, now, tenant)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value
        between()


def test_a_snapshot_tells_what_is_waiting_running_and_bound():
    world = World(cores=1, workers_max=2)
    for name in "fg":
        world.deploy(spec(name, blobs=(("shared", 10),), family="one", max_batch=1))
    world.arrive("f")
    world.settle_processes()
    world.arrive("f")
    world.arrive("g")
    known = taken(world.scheduler, world.now)
    assert [(each.spec.id, each.state, each.queued, each.workers) for each in known.functions] == [
        ("f@1", "awake", 1, (1,)),
        ("g@1", "waking", 1, ()),
    ]
    assert {(each.family, each.members) for each in known.functions} == {("f@1", 2)}
    [worker] = known.workers
    assert (worker.worker, worker.family, worker.state, worker.bound) == (1, "f@1", "busy", ("f@1",))
    assert (known.families, known.cores_running, known.host_bytes) == (1, 1, 10)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 16), steps=st.integers(20, 200))
@example(seed=886, steps=20)
def test_a_snapshot_says_the_same_as_the_tables_and_does_not_change(seed, steps):
    world = World(policy="overwinter", cores=2, workers_max=4, host_bytes=60, memory_bytes=40)
    play(world, Random(seed), steps)
    known = taken(world.scheduler, world.now)
    state = world.state
    assert [each.spec.id for each in known.functions] == list(state.functions)
    for each in known.functions:
        function = state.functions[each.spec.id]
        assert each.state == function_state(function, world.now)
        assert (each.queued, each.workers) == (len(function.queue), tuple(function.workers))
    assert [(each.worker, each.state) for each in known.workers] == [
        (id_, worker_state(worker)) for id_, worker in state.workers.items()
    ]
    before = repr(known)
    play(world, Random(seed + 1), 50, first=steps)
    assert repr(known) == before


def test_what_is_removed_before_a_snapshot_reaches_it_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "COPIED_PER_STEP", 1)
    world = World()
    for name in "fgh":
        world.deploy(spec(name, blobs=((name, 10),)))
        world.arrive(name)
    world.settle()
    left = ["h@1", "g@1"]

    def between() -> None:
        if left:
            world.send(Removed(left.pop(0)))
            world.settle()

    known = taken(world.scheduler, world.now, between)
    assert [each.spec.id for each in known.functions] == ["f@1", "g@1"]
    assert [each.bound for each in known.workers] == [("f@1",)]
    assert isinstance(known.functions[0], FunctionSnapshot)


def test_of_one_tenant_only_its_own_functions_are_described():
    world = World()
    for number in range(3 * module.COPIED_PER_STEP):
        world.deploy(spec(f"f{number}", tenant="many"))
    world.deploy(spec("g", tenant="one"))
    steps = list(snapshot(world.state, world.scheduler.resources, world.now, "none"))
    assert steps == []
    known = taken(world.scheduler, world.now, tenant="one")
    assert [each.spec.id for each in known.functions] == ["g@1"]
    assert len(taken(world.scheduler, world.now, tenant="many").functions) == 3 * module.COPIED_PER_STEP

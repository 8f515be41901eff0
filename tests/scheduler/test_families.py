"""Functions of one family share workers: where each is bound, and what a failure affects."""

from itertools import pairwise

import pytest

from overwinter.core.actions import Bind, Drop, Explanation, Refuse, Reply, Run, StartWorker, StopWorker, Unbind
from overwinter.core.events import Bound, MemoryMeasured, MemoryPressure, Removed, UnloadAsked, WorkerExited
from overwinter.scheduler import binding, families, retention
from overwinter.scheduler.shared_runs import SUSPECT_RUNS
from tests.scheduler.world import World, spec


def member(name, version=1, **settings):
    settings.setdefault("max_workers", 8)
    return spec(name, version, (("shared", 10), (f"own-of-{name}", 5)), family="one", **settings)


def family(*names, config=None, **settings) -> World:
    """Return a world with functions of one family, of which the first is awake."""
    world = World(**(config or {}))
    for name in names:
        world.deploy(member(name, **settings))
    world.arrive(names[0])
    world.settle()
    return world


def of(kind, actions) -> list:
    return [action for action in actions if isinstance(action, kind)]


def test_a_sibling_is_bound_in_the_worker_that_is_there_and_needs_none_of_its_own():
    world = family("f", "g", "h")
    for name in ("g", "h", "g"):
        request = world.arrive(name)
        world.settle()
        assert isinstance(world.answers[request], Reply)
        assert world.answers[request].function == f"{name}@1"
    assert len(of(StartWorker, world.log)) == 1
    assert [bind.function for bind in of(Bind, world.log)] == ["g@1", "h@1"]
    assert [reply.start for reply in of(Reply, world.log)] == ["disk", "disk", "disk", "warm"]
    assert world.bound == {1: {"f@1", "g@1", "h@1"}}


def test_a_bind_in_a_siblings_worker_and_its_unbind_are_explained():
    world = family("f", "g")
    world.arrive("g")
    world.settle()
    [bound] = [each for each in of(Explanation, world.log) if each.what == "bind"]
    assert (bound.function, "worker 1" in bound.why) == ("g@1", True)
    world.send(UnloadAsked("g@1"))
    [let_go] = [each for each in of(Explanation, world.log) if each.what == "unbind"]
    assert (let_go.function, "worker 1" in let_go.why) == ("g@1", True)


def test_a_bind_of_blocks_in_memory_is_distinguished_from_a_wake():
    world = family("f", "g")
    # A function that was deployed after the worker started is not bound there.
    world.deploy(member("h"))
    for name, start in (("g", "bound"), ("h", "host")):
        world.arrive(name)
        world.load_blocks(added=0)
        world.settle()
        assert of(Reply, world.log)[-1].start == start


def test_members_wait_for_a_slot_of_their_family_in_the_order_in_which_they_are_due():
    world = family("f", "g", "h", max_workers=1)
    first = world.arrive("f")
    for name in ("h", "g"):
        world.now += 0.01
        world.arrive(name)
    world.settle()
    answered = [reply.function for reply in of(Reply, world.log) if reply.request >= first]
    assert answered == ["f@1", "h@1", "g@1"]
    assert len(of(StartWorker, world.log)) == 1


def test_runs_of_several_members_are_in_progress_in_one_worker_at_the_same_time():
    world = family("f", "g", concurrency=2)
    world.arrive("g")
    world.settle()
    world.arrive("f")
    world.arrive("g")
    assert sorted(name for run in world.running.values() for name in world.whose(run)) == ["f@1", "g@1"]
    assert {run.worker for run in world.running.values()} == {1}


def test_a_function_on_trial_is_tried_in_a_worker_of_its_own_and_its_siblings_do_not_wait_for_it():
    world = family("f", "g", max_workers=1)
    world.deploy(member("g", 2), on_trial=True)
    world.load_blocks()
    [start] = of(StartWorker, world.log)[1:]
    assert (start.function, len(of(Bind, world.log))) == ("g@2", 0)
    world.arrive("g", version=1)
    while world.loads or world.binding or world.running:
        _ = world.load_blocks() if world.loads else world.bind() if world.binding else world.finish()
    assert len(of(Reply, world.log)) == 2
    assert start.worker in world.starting


def test_a_function_that_was_deployed_after_a_worker_started_is_not_bound_there():
    world = family("f")
    world.deploy(member("g"))
    world.arrive("g")
    world.settle()
    assert [start.function for start in of(StartWorker, world.log)] == ["f@1", "g@1"]
    assert not of(Bind, world.log)


def test_an_idle_worker_is_stopped_for_a_function_of_its_family_that_was_deployed_after_its_start():
    world = family("f", config={"workers_max": 1})
    world.deploy(member("g"))
    request = world.arrive("g")
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert [start.function for start in of(StartWorker, world.log)] == ["f@1", "g@1"]


def test_requests_that_wait_for_a_bind_count_as_bound_only_if_it_succeeds():
    world = family("f", "g")
    requests = [world.arrive("g")]
    world.load_blocks(added=0)
    requests.append(world.arrive("g"))
    world.bind()
    world.settle()
    assert [world.answers[request].start for request in requests] == ["bound", "bound"]
    world = family("f", "g")
    request = world.arrive("g")
    world.load_blocks(added=0)
    world.fail_bind()
    world.settle()
    assert world.answers[request].start == "host"


def test_a_bind_that_fails_is_not_tried_again_in_that_worker_and_another_is_forked():
    world = family("f", "g")
    request = world.arrive("g")
    world.load_blocks()
    world.fail_bind()
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert [start.function for start in of(StartWorker, world.log)] == ["f@1", "g@1"]
    world.settle()
    world.arrive("g")
    assert [run.worker for run in world.running.values()] == [2]


def test_an_answer_to_a_bind_that_is_over_changes_nothing():
    world = family("f", "g")
    world.arrive("g")
    world.load_blocks()
    [bind] = world.binding
    world.send(Removed("g@1"))
    world.deploy(member("g"))
    assert world.send(Bound(bind.worker, "g@1", bind.operation + 1)) == []
    assert of(Unbind, world.bind()) == [Unbind(bind.worker, "g@1")]


def test_a_removed_member_is_unbound_and_its_sibling_continues():
    world = family("f", "g")
    world.arrive("g")
    world.settle()
    assert Unbind(1, "g@1") in world.send(Removed("g@1"))
    assert world.alive == {1}
    world.arrive("f")
    world.settle()
    assert world.answers[3].start == "warm"


def test_a_running_member_is_unbound_at_the_end_of_its_run_even_if_its_request_was_refused_before():
    for ends in (True, False):
        world = family("f", "g", config={"drain_timeout_s": 2.0}, concurrency=2)
        request = world.arrive("g")
        world.load_blocks()
        world.bind()
        actions = world.send(UnloadAsked("g@1"))
        assert not of(Unbind, actions)
        assert not of(StopWorker, actions)
        if not ends:
            world.now += 1.0
            world.ring()
            assert isinstance(world.answers[request], Refuse)
        actions = world.finish()
        assert of(Unbind, actions) == [Unbind(1, "g@1")]
        assert isinstance(world.answers[request], Reply) == ends
        assert not world.stopping


@pytest.mark.parametrize("event", [Removed, UnloadAsked])
def test_a_removed_member_whose_run_hangs_costs_its_worker_and_the_runs_of_siblings_are_tried_again(event):
    world = family("f", "g", config={"drain_timeout_s": 2.0}, concurrency=2, timeout_s=1000.0)
    hung = world.arrive("g")
    world.load_blocks()
    world.bind()
    asked_at = world.now
    world.send(event("g@1"))
    other = world.arrive("f")
    while not world.stopping:
        world.ring()
    assert isinstance(world.answers[hung], Refuse)
    assert world.now == asked_at + 4.0
    world.die(1)
    world.settle()
    assert isinstance(world.answers[other], Reply)


def test_a_workers_death_costs_the_requests_of_each_of_its_functions_one_retry():
    world = family("f", "g", concurrency=2)
    world.arrive("g")
    world.settle()
    requests = [world.arrive("f"), world.arrive("g")]
    world.die(1)
    world.calm()
    assert all(isinstance(world.answers[request], Reply) for request in requests)


def test_a_function_that_kills_two_workers_gets_workers_of_its_own_and_leaves_its_family():
    world = family("f", "g", config={"backoff_first_s": 0.1})
    for _ in range(2):
        world.arrive("f")
        world.settle()
        world.arrive("g")
        while not any("g@1" in world.whose(run) for run in world.running.values()):
            if world.loads or world.starting or world.binding or world.stopping:
                world.settle_processes()
            else:
                world.ring()
        world.die(next(run.worker for run in world.running.values() if "g@1" in world.whose(run)))
        world.settle()
        while world.open:
            world.ring()
            world.settle()
    assert [each.function for each in of(Explanation, world.log) if each.what == "isolate"] == ["g@1"]
    world.arrive("f")
    world.settle()
    world.arrive("g")
    world.settle()
    assert [bound for bound in world.bound.values() if {"f@1", "g@1"} <= bound][2:] == []
    assert world.state.functions["g@1"].family is not world.state.functions["f@1"].family


def begin_in_one_worker(world, *, hangs: str) -> int:
    """Begin a run of `g`, or its bind if `hangs` is "binds", in the worker of `f`; return that worker."""
    world.arrive("f")
    world.calm()
    world.arrive("g")
    while not (world.binding if hangs == "binds" else world.running):
        world.load_blocks() if world.loads else world.bind()
    return (world.binding or [*world.running.values()])[0].worker


@pytest.mark.parametrize("hangs", ["runs", "binds"])
def test_a_function_that_hangs_twice_gets_workers_of_its_own(hangs):
    config = {"start_timeout_s": 5.0, "backoff_first_s": 0.1, "backoff_max_s": 0.2}
    world = family("f", "g", config=config, timeout_s=5.0)
    isolated = []
    for _ in range(2):
        assert isolated == []
        worker = begin_in_one_worker(world, hangs=hangs)
        assert {"f@1"} <= world.bound[worker]
        while worker not in world.stopping:
            world.ring()
        world.die(worker)
        world.calm()
        isolated = [each.function for each in of(Explanation, world.log) if each.what == "isolate"]
    assert isolated == ["g@1"]
    for name in ("f", "g", "f"):
        request = world.arrive(name)
        world.settle()
        assert isinstance(world.answers[request], Reply)
    assert [bound for bound in map(world.bound.get, world.alive) if {"f@1", "g@1"} <= bound] == []


def test_a_function_that_hangs_now_and_then_stays_with_its_siblings():
    world = family("f", "g", config={"backoff_first_s": 0.1}, timeout_s=5.0)
    for _ in range(2):
        worker = begin_in_one_worker(world, hangs="runs")
        while worker not in world.stopping:
            world.ring()
        world.die(worker)
        world.calm()
        for _ in range(SUSPECT_RUNS + 1):
            world.arrive("g")
            world.calm()
    assert [each for each in of(Explanation, world.log) if each.what == "isolate"] == []


def test_a_workers_keep_alive_is_that_of_the_functions_that_are_still_bound_in_it():
    world = World()
    world.deploy(member("f", keep_alive_s=5.0, timeout_s=300.0))
    world.deploy(member("g", timeout_s=300.0))
    for name in ("g", "f"):
        world.arrive(name)
        world.settle()
    assert world.bound == {1: {"f@1", "g@1"}}
    idle_since = world.now
    world.now += 1.0
    world.send(Removed("g@1"))
    while not world.stopping:
        world.ring()
    assert world.now <= idle_since + 5.0


def test_blocks_of_bound_members_are_held_until_they_are_unbound():
    world = family("f", "g", config={"host_bytes": 20}, keep_alive_s=60.0)
    world.arrive("g")
    world.settle()
    world.deploy(member("h"))
    world.arrive("h")
    assert not of(Drop, world.log)
    world.calm()
    assert of(Reply, world.log)[-1].function == "h@1"
    dropped = [index for index, each in enumerate(world.log) if isinstance(each, Drop)]
    gone = [index for index, each in enumerate(world.log) if isinstance(each, Unbind | StopWorker)]
    assert gone[0] < dropped[0]


def test_idle_members_of_a_worker_whose_memory_is_far_beyond_its_need_are_unbound():
    world = family("f", "g", "h")
    for name in ("g", "h"):
        world.now += 0.1
        world.arrive(name)
        world.settle()
    actions = world.send(MemoryMeasured(((1, 1 << 30),)))
    assert of(Unbind, actions) == [Unbind(1, "f@1"), Unbind(1, "g@1")]


def test_the_memory_that_many_members_add_to_a_worker_is_within_its_need():
    names = [f"m{number}" for number in range(100)]
    world = family(*names)
    for name in names:
        world.now += 0.1
        world.arrive(name)
        world.settle()
    (worker,) = world.state.workers.values()
    assert len(worker.bound) == 100
    assert not of(Unbind, world.send(MemoryMeasured(((1, worker.point.memory_bytes + (100 << 20)),))))
    assert of(Unbind, world.send(MemoryMeasured(((1, worker.point.memory_bytes + (400 << 20)),))))


def test_a_lost_block_releases_the_blocks_of_all_functions_that_were_bound_in_the_worker():
    world = family("f", "g")
    world.arrive("g")
    world.settle()
    world.alive.discard(1)
    world.send(WorkerExited(1, "StoreError", "changed", lost_blocks=True))
    assert not world.state.functions["f@1"].loaded
    assert not world.state.functions["g@1"].loaded


def test_a_function_of_another_family_shares_no_worker():
    world = family("f")
    other = spec("g", 1, (("shared", 10),), family="another", max_workers=8)
    world.deploy(other)
    world.arrive("g")
    world.settle()
    assert not of(Bind, world.log)
    assert len({run.worker for run in of(Run, world.log)}) == 2


def test_the_shortest_slo_of_a_family_counts_and_it_may_have_as_many_workers_as_its_members_together():
    world = World()
    world.deploy(member("f", slo_ms=400.0, max_workers=2))
    world.deploy(member("g", slo_ms=100.0, max_workers=5))
    found = world.state.functions["f@1"].family
    assert (found.slo_ms, found.max_workers) == (100.0, 7)
    world.send(Removed("g@1"))
    assert (found.slo_ms, found.max_workers) == (400.0, 2)


def test_functions_whose_keep_alives_end_together_are_unbound_in_several_steps(monkeypatch):
    monkeypatch.setattr(binding, "UNBOUND_MAX", 2)
    names = [f"f{number}" for number in range(8)]
    world = family(*names, keep_alive_s=30.0)
    for name in names:
        world.arrive(name)
        world.settle()
    [worker] = world.alive
    assert len(world.bound[worker]) == len(names)
    world.now += 60.0
    left = [len(world.bound[worker])]
    while worker in world.alive:
        world.ring()
        left.append(len(world.bound[worker]))
        world.settle_processes()
    # When the worker's own keep-alive ends, it stops with the functions that are still bound.
    assert all(before - after <= 2 for before, after in pairwise(left))
    assert left[1] == len(names) - 2


def test_a_shortage_of_memory_unbinds_some_functions_in_each_step(monkeypatch):
    monkeypatch.setattr(retention, "UNBOUND_MAX", 2)
    names = [f"f{number}" for number in range(8)]
    world = family(*names)
    for name in names:
        world.arrive(name)
        world.settle()
    [worker] = world.alive
    world.now += 1000.0
    actions = world.send(MemoryPressure(10))
    assert len(of(Unbind, actions)) == 2
    assert worker in world.alive


def test_of_many_waiting_functions_some_try_again_at_the_end_of_a_run_and_all_are_answered(monkeypatch):
    monkeypatch.setattr(families, "MARKED_MAX", 2)
    names = [f"f{number}" for number in range(12)]
    world = family(*names, max_workers=1, timeout_s=1000.0, config={"cores": 1})
    for name in names:
        world.arrive(name)
        world.settle()
    marked = []
    mark = type(world.scheduler.cycle).mark
    monkeypatch.setattr(type(world.scheduler.cycle), "mark", lambda *of: (marked.append(of[1]), mark(*of))[1])
    for name in names:
        world.arrive(name)
        world.now += 0.001
    counts = []
    while world.running:
        marked.clear()
        world.finish()
        counts.append(len({each.spec.id for each in marked}))
    # The two that are due first, two that are bound, and the one whose run has ended.
    assert max(counts) <= 2 + 2 + 1
    assert len(world.answers) == 2 * len(names) + 1
    assert all(isinstance(answer, Reply) for answer in world.answers.values())


def test_if_all_functions_that_try_again_refuse_their_late_requests_others_get_the_slot_immediately(monkeypatch):
    monkeypatch.setattr(families, "MARKED_MAX", 2)
    names = [f"f{number}" for number in range(12)]
    world = family(*names, max_workers=1, slo_ms=100.0, late="refuse", config={"cores": 1})
    for name in names:
        world.arrive(name)
        world.settle()
    for name in names[:9]:
        world.arrive(name)
    world.now = 0.2
    timely = [world.arrive(name) for name in names[9:]]
    world.finish()
    while not world.running:
        world.ring()
    assert world.now == 0.2
    world.settle()
    assert [type(world.answers[request]) for request in timely] == [Reply] * 3


def test_the_function_whose_run_has_ended_is_marked_and_one_that_waits_and_is_to_be_woken_counts_once(monkeypatch):
    monkeypatch.setattr(families, "MARKED_MAX", 2)
    world = family(*"fghij", config={"cores": 1})
    for name in "fghij":
        world.now += 0.001
        world.arrive(name)
        world.settle_processes()
    [one], cycle = world.state.families.values(), world.scheduler.cycle
    assert list(one.waiting) == ["g@1", "h@1", "i@1", "j@1"]
    one.waking |= dict.fromkeys(("g@1", "h@1"))
    families.mark(cycle, one, world.state.functions["j@1"])
    assert list(cycle.changed) == ["g@1", "h@1", "j@1"]
    cycle.changed.clear()
    monkeypatch.setattr(families, "MARKED_MAX", 4)
    families.mark(cycle, one)
    assert list(cycle.changed) == ["g@1", "h@1", "i@1", "j@1"]


def test_a_worker_whose_memory_is_far_beyond_its_need_unbinds_some_functions_in_each_step(monkeypatch):
    names = [f"f{number}" for number in range(8)]
    world = family(*names)
    for name in names:
        world.arrive(name)
        world.settle()
    [worker] = world.state.workers.values()
    marked: list[str] = []
    mark = families.mark
    monkeypatch.setattr(families, "mark", lambda cycle, family: (marked.append(family.id), mark(cycle, family))[1])
    monkeypatch.setattr(binding, "UNBOUND_MAX", 2)
    binding.unbind_half(world.scheduler.cycle, worker)
    assert len(worker.bound) == len(names) - 2
    # The functions that may use it are marked once, not for each that leaves.
    assert marked == ["one"]


def test_a_function_that_can_be_bound_does_not_wait_behind_those_whose_blocks_are_loading(monkeypatch):
    monkeypatch.setattr(families, "MARKED_MAX", 2)
    world = World(cores=1)
    world.resident |= {("", block) for block in ("shared", "own-of-x", "own-of-y")}
    for name in ("x", "y", *"abcd"):
        world.deploy(member(name, max_workers=1))
    world.arrive("x")
    world.ready()
    [first] = world.running.values()
    for name in "abcd":
        world.arrive(name)
        world.now += 0.001
    assert len(world.loads) == 4
    world.arrive("y")
    world.finish_run(first)
    assert [bind.function for bind in world.binding] == ["y@1"]
    world.calm()


def test_a_worker_of_a_family_without_members_is_stopped_when_the_run_of_an_isolated_function_ends():
    world = World(backoff_first_s=0.1, cores=8)
    for name in "fg":
        world.deploy(member(name, timeout_s=50.0))
    for _ in range(3):
        world.arrive("g")
        world.settle_processes()
    for worker in (1, 2):
        world.die(worker)
        world.settle_processes()
    assert [each.what for each in of(Explanation, world.log)].count("isolate") == 1
    world.send(Removed("f@1"))
    [run] = [each for each in world.running.values() if each.worker == 3]
    world.finish_run(run)
    assert 3 in world.stopping
    world.calm()


def test_an_isolated_function_does_not_wait_for_the_start_of_a_worker_that_it_leaves():
    world = World(backoff_first_s=0.1, cores=8)
    for name in "fg":
        world.deploy(member(name, timeout_s=500.0))
    for _ in range(2):
        world.arrive("g")
        world.settle_processes()
    world.arrive("g")
    [third] = world.starting
    for worker in (1, 2):
        world.die(worker)
    assert [each.what for each in of(Explanation, world.log)].count("isolate") == 1
    while not [each for each in world.starting if each != third]:
        assert world.now < 10.0
        world.ring()
    world.calm()


@pytest.mark.parametrize("waits", [False, True])
def test_a_function_in_backoff_does_not_keep_the_idle_workers_of_its_family(waits):
    world = World(cores=8, workers_max=2, backoff_first_s=20.0, backoff_max_s=30.0)
    for name in "fx":
        world.deploy(member(name))
    world.deploy(spec("g", tenant="u", blobs=(("g", 10),)))
    for _ in range(2):
        world.arrive("f")
    while world.loads or world.starting:
        world.settle_processes()
    while world.running:
        world.finish()
    world.now += 50.0
    world.arrive("x")
    world.fail_load(error="StoreError")
    assert world.state.functions["x@1"].backoff_until > world.now
    if waits:
        world.arrive("x")
    assert len(world.state.tenants["t"].spare) == 2
    world.arrive("g")
    world.load_blocks()
    assert len(world.stopping) == 1


def test_a_function_in_backoff_does_not_keep_an_idle_worker_in_which_it_is_not_bound():
    world = World(cores=8, workers_max=3, backoff_first_s=20.0, backoff_max_s=30.0)
    for name in "fx":
        world.deploy(member(name, timeout_s=500.0))
    for _ in range(3):
        world.arrive("f")
    while world.loads or world.starting:
        world.settle_processes()
    while world.running:
        world.finish()
    for _ in range(2):
        world.arrive("x")
    while world.loads or world.starting:
        world.settle_processes()
    for _ in range(3):
        world.settle_processes()
    function = world.state.functions["x@1"]
    world.die(next(iter(world.running.values())).worker)
    assert function.backoff_until > world.now
    assert function.queue
    [lacking] = [worker for worker in world.state.workers.values() if worker.is_idle]
    assert "x@1" not in lacking.bound
    assert list(world.state.tenants["t"].spare) == [lacking.id]


def test_a_function_in_backoff_keeps_the_idle_worker_in_which_it_is_bound():
    world = World(cores=2, workers_max=4, backoff_first_s=20.0, backoff_max_s=30.0)
    world.deploy(spec("f", max_workers=2))
    for name, tenant in (("h", "t"), ("g", "u")):
        world.deploy(spec(name, tenant=tenant, blobs=((name, 10),)))

    def begin(*names):
        for name in names:
            world.arrive(name)
            while world.loads or world.starting:
                world.settle_processes()

    def finish():
        while world.running:
            world.finish()

    begin("f", "f")
    finish()
    for name in "hg":
        begin(name)
        finish()
    function = world.state.functions["f@1"]
    world.arrive("f")
    [run] = world.running.values()
    world.die(run.worker)
    assert function.backoff_until > world.now
    finish()
    [left] = function.workers
    begin("h", "g")
    request = world.arrive("f")
    assert function.waits_in == "cores"
    assert left not in world.state.tenants["t"].spare
    finish()
    assert isinstance(world.answers[request], Reply)

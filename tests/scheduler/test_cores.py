"""Which request gets the next free core: the one due first that can be in time, and no request waits forever."""

from collections.abc import Iterable

from overwinter.core.events import Alarm, LoadAsked
from overwinter.core.profile import Point, Profile
from overwinter.scheduler import admission
from overwinter.scheduler.order import INVALID_MAX, LATE_EVERY
from tests.scheduler.world import World, spec

RUN_S = 0.05


def profile(run_s: float = RUN_S, cores: int = 1) -> Profile:
    return Profile(weight_bytes=30, macs=1, points=(Point(cores, 5, 1, 1, run_s),), wake_s=0.02)


def awake(names: Iterable[str] = "", cores: int = 1, **settings) -> World:
    """Return a world in which each of these functions has an idle worker."""
    world = World(cores=cores)
    for name in names:
        world.deploy(spec(name, profile=profile(), keep_alive_s=1000.0, timeout_s=500.0, **settings))
        world.arrive(name)
        world.settle()
    world.answers.clear()
    return world


def order(world: World) -> list[str]:
    """Complete all runs, one after another, and return the functions in the order of their answers."""
    world.settle()
    return [answer.function[0] for answer in world.answers.values()]


def running(world: World) -> set[str]:
    return {world.state.workers[run.worker].function[0] for run in world.running.values()}


def test_no_more_runs_and_wakes_are_in_progress_than_there_are_cores():
    world = World(cores=2)
    for name in "abcdef":
        world.deploy(spec(name, profile=profile(), slo_ms=500))
        world.arrive(name)
    while world.loads:
        world.load_blocks()
    steps = 0
    while len(world.answers) < 6:
        assert len(world.starting) + len(world.running) <= 2
        if world.starting:
            world.ready()
        else:
            world.finish()
        steps += 1
        assert steps < 50
    assert {type(answer).__name__ for answer in world.answers.values()} == {"Reply"}


def test_the_core_of_a_start_goes_to_its_request_also_while_siblings_wait_for_its_worker():
    world = awake("x", slo_ms=100)
    for name in "fg":
        made = spec(name, profile=profile(), blobs=((name, 1),), family="one", timeout_s=500.0, slo_ms=10_000)
        world.deploy(made)
    world.arrive("f")
    world.load_blocks()
    world.arrive("g")
    world.arrive("x")
    world.settle_processes()
    assert running(world) == {"f"}


def of_tenants(*names: str, cores: int = 2) -> World:
    """Return a world in which these functions, whose first letter is their tenant, have an idle worker each."""
    world = World(cores=cores)
    for name in names:
        world.deploy(spec(name, profile=profile(), tenant=name[0], keep_alive_s=1000.0, timeout_s=500.0))
        world.arrive(name)
        world.settle()
    world.answers.clear()
    return world


def test_starts_that_serve_no_request_keep_no_core_from_requests():
    world = of_tenants("v")
    for number in range(30):
        world.deploy(spec(f"e{number}", profile=profile(), tenant="e", timeout_s=500.0))
        world.send(LoadAsked(f"e{number}@1"))
        while world.loads:
            world.load_blocks()
    assert len(world.starting) == 30
    world.arrive("v")
    world.arrive("v")
    assert running(world) == {"v"}
    assert world.state.holding_cores.keys() == {("run", run) for run in world.running}


def test_a_tenant_that_holds_no_core_need_not_wait_for_the_runs_of_others():
    evil = [f"e{number}" for number in range(20)]
    world = of_tenants(*evil, "v1", "v2")
    for name in evil:
        world.arrive(name)
    assert len(world.running) == 2
    asked = [world.arrive(name) for name in ("v1", "v2")]
    assert len(world.running) == 3
    while asked[1] not in world.answers:
        run = next(each for each in world.running.values() if each.requests[0] in asked)
        world.finish_run(run)
    assert [answer.request for answer in world.answers.values()] == asked


def test_a_tenant_that_holds_no_core_gets_one_for_its_request_that_is_due_first():
    world = of_tenants("e1", "e2", "v1", cores=1)
    world.deploy(spec("v2", profile=profile(), tenant="v", slo_ms=900, timeout_s=500.0))
    world.arrive("v2")
    world.settle()
    # Each of the tenants has one run, and its further requests wait.
    for name in ("e1", "v1", "e2"):
        world.arrive(name)
    again, urgent = world.arrive("v1"), world.arrive("v2")
    assert len(world.running) == 2
    [mine] = [run for run in world.running.values() if world.state.workers[run.worker].tenant == "v"]
    world.finish_run(mine)
    assert any(urgent in run.requests for run in world.running.values())
    assert not any(again in run.requests for run in world.running.values())


def test_the_request_due_first_goes_first():
    world = awake()
    for name, slo_ms in (("a", 1000), ("b", 900), ("c", 500), ("d", None)):
        world.deploy(spec(name, profile=profile(), keep_alive_s=1000.0, timeout_s=500.0, slo_ms=slo_ms))
        world.arrive(name)
        world.settle()
    world.answers.clear()
    for name in "adbc":
        world.arrive(name)
    assert order(world) == ["a", "c", "b", "d"]


def test_requests_that_can_be_in_time_run_before_late_ones():
    world = awake("abc", slo_ms=100)
    world.arrive("a")
    world.arrive("b")
    world.now += 0.09
    world.arrive("c")
    assert order(world) == ["a", "c", "b"]


def test_a_stage_is_ordered_by_its_pipelines_slo_and_not_by_its_functions_own():
    world = awake("abcd", slo_ms=500)
    world.arrive("a")
    world.arrive("b", due=world.now - 0.1)
    world.arrive("c")
    world.arrive("d", due=world.now + 0.4)
    assert order(world) == ["a", "d", "c", "b"]


def test_a_late_request_is_answered_although_others_keep_arriving():
    world = awake("ab", slo_ms=100, queue_limit=1000)
    world.arrive("a")
    late = world.arrive("b")
    world.now += 1.0
    ended = 0
    while late not in world.answers:
        world.arrive("a")
        world.arrive("a")
        world.now += 0.01
        world.finish()
        ended += 1
        assert ended <= 2 * LATE_EVERY


def test_new_requests_of_a_function_go_before_those_that_are_late():
    world = awake("a", slo_ms=200)
    old = [world.arrive("a") for _ in range(8)]
    for _ in range(4):
        world.now += RUN_S
        world.finish()
    new = [world.arrive("a") for _ in range(2)]
    for _ in range(3):
        world.now += RUN_S
        world.finish()
    assert list(world.answers) == [*old[:5], *new]
    world.settle()
    assert list(world.answers)[-3:] == old[5:]


def test_late_requests_of_a_single_function_are_answered_now_and_then():
    world = awake("a", slo_ms=200, queue_limit=1000)
    late = [world.arrive("a") for _ in range(8)][-1]
    ended = 0
    while late not in world.answers:
        world.arrive("a")
        world.now += RUN_S
        world.finish()
        ended += 1
        assert ended <= 8 * LATE_EVERY
    assert ended > 8


def test_of_functions_due_at_the_same_time_the_one_that_has_waited_longest_runs_first():
    world = awake("abc", slo_ms=1000)
    for name in "caba":
        world.arrive(name)
    assert order(world) == ["c", "a", "b", "a"]


def test_the_number_of_a_functions_runs_puts_no_late_request_first_in_the_queue_for_cores():
    world = awake("ab", slo_ms=100)
    while (world.state.functions["a@1"].runs + 1) % LATE_EVERY:
        world.arrive("a")
        world.settle()
    world.answers.clear()
    world.arrive("b")
    world.arrive("a")
    world.now += 0.12
    new = world.arrive("a")
    world.now += 0.01
    world.arrive("b")
    world.finish()
    assert [run.requests for run in world.running.values()] == [(new,)]
    assert order(world) == ["b", "a", "b", "a"]


def test_a_late_request_behind_others_of_its_function_has_its_share_of_the_cores():
    world = awake("ab", slo_ms=100, queue_limit=1000)
    world.arrive("b")
    late = world.arrive("a")
    world.now += 0.12
    ended = 0
    while late not in world.answers:
        world.arrive("a")
        world.arrive("b", priority=1)
        world.now += 0.01
        world.finish()
        ended += 1
        assert ended <= 2 * LATE_EVERY
    assert ended > 2


def test_a_priority_goes_before_an_slo():
    world = awake("abc", slo_ms=500)
    world.arrive("a")
    world.arrive("b")
    # It is due after the other one.
    world.now += 0.001
    world.arrive("c", priority=1)
    assert order(world) == ["a", "c", "b"]


def test_a_run_that_hangs_holds_its_core_for_a_while_only():
    world = awake("ab", slo_ms=500)
    world.arrive("a")
    asked = world.arrive("b")
    assert running(world) == {"a"}
    for _ in range(5):
        world.ring()
        if "b" in running(world):
            break
    assert running(world) == {"a", "b"}
    assert world.now < 10
    assert asked not in world.answers


def test_a_run_of_a_handler_waits_for_no_core_and_holds_none():
    world = awake("ab", slo_ms=500)
    world.deploy(spec("h", has_handler=True, keep_alive_s=1000.0, timeout_s=500.0))
    world.arrive("h")
    world.settle()
    world.arrive("a")
    world.arrive("h")
    world.arrive("b")
    assert running(world) == {"a", "h"}
    world.finish()
    assert running(world) == {"h", "b"}


def test_a_run_wider_than_the_machine_has_it_to_itself():
    world = awake("a", cores=2, slo_ms=500)
    wide = spec("w", profile=profile(cores=4), threads=4, keep_alive_s=1000.0, timeout_s=500.0, slo_ms=400)
    world.deploy(wide)
    world.arrive("w")
    world.settle()
    world.arrive("a")
    world.arrive("w")
    world.arrive("a")
    assert running(world) == {"a"}
    world.finish()
    assert running(world) == {"w"}
    world.finish()
    assert running(world) == {"a"}


def test_a_wake_holds_its_core_for_the_request_it_was_made_for():
    world = awake("ab", slo_ms=500)
    world.deploy(spec("c", profile=profile(), slo_ms=5000))
    world.arrive("c")
    for name in "ab":
        world.arrive(name)
    assert not world.running
    world.ready()
    assert running(world) == {"c"}


def test_a_function_whose_request_expired_waits_for_no_core():
    world = awake("ab", slo_ms=500)
    world.arrive("a")
    world.arrive("b", deadline=world.now + 0.01)
    world.ring()
    assert not world.state.functions["b@1"].queue
    world.finish()
    assert not world.state.functions["b@1"].waits_in
    assert not world.running


def test_functions_that_no_longer_wait_do_not_hide_an_urgent_one():
    world = World(cores=1)
    for name, tenant, slo_ms in (("slow", "t", None), ("other", "u", None), ("short", "t", 500.0)):
        world.deploy(spec(name, blobs=((name, 1),), tenant=tenant, slo_ms=slo_ms, max_workers=1))
        world.arrive(name)
        world.settle_processes()
        world.now += 1.0 if name == "slow" else 0.1
        world.finish()
    for _ in range(40):
        # The request of the other tenant joins the queue, and begins in the same step.
        world.arrive("slow")
        world.arrive("other")
        slow, other = world.running.values()
        world.now += 0.1
        world.finish_run(other)
        world.now += 0.9
        world.finish_run(slow)
    queue = world.state.core_queue
    assert len(queue.due) <= len(queue.timely) + INVALID_MAX
    world.arrive("slow")
    # The heap now begins with many invalid entries.
    queue.due[:0] = [(0, 0.0, 0, "gone@1")] * (INVALID_MAX - len(queue.due))
    urgent = world.arrive("short")
    assert [run.requests for run in world.running.values()][1:] == [(urgent,)]


def waiting_for_further_workers(count: int) -> tuple[World, list[int]]:
    """Functions that each run a request, and whose further requests wait while other runs take the last cores."""
    names = [f"f{number}" for number in range(count)]
    world = awake([*names, "x"], cores=count + 1, max_workers=2)
    for name in (*names, "x"):
        world.arrive(name)
    further = [world.arrive(name) for name in names for _ in range(2)][::2]
    assert not world.starting
    assert not world.state.core_queue.waits
    return world, further


def test_a_core_that_becomes_free_is_used_for_a_further_worker():
    world, [request] = waiting_for_further_workers(1)
    world.now += 0.01
    world.finish_run(list(world.running.values())[-1])
    world.settle_processes()
    assert any(request in run.requests for run in world.running.values())


def test_of_many_functions_that_could_use_a_further_worker_some_are_asked_in_each_step(monkeypatch):
    monkeypatch.setattr(admission, "ASKED_MAX", 2)
    world, _ = waiting_for_further_workers(7)
    asked: list[str] = []
    monkeypatch.setattr(admission, "next_want", lambda _, function: asked.append(function.spec.id))
    counts = []
    world.scheduler.cycle.cores += 1
    while world.state.core_queue.for_workers:
        asked.clear()
        world.scheduler.handle(Alarm(), world.now)
        counts.append(len(asked))
    assert counts == [2, 2, 2, 1]

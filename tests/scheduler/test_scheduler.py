"""The scheduler's handling of requests and functions, one test for each case, driven synchronously."""

import msgspec
import pytest

from overwinter.core.actions import Drop, LoadBlocks, LoadFinished, Prepare, Refuse, Reply, Run, StartWorker, StopWorker
from overwinter.core.events import (
    Cancelled,
    Deployed,
    LoadAsked,
    Removed,
    RunEnded,
    UnloadAsked,
    WorkerReady,
    ZygoteLost,
)
from overwinter.scheduler.lifecycles import function_state
from tests.scheduler.world import World, spec


def kinds(actions):
    return [type(action).__name__ for action in actions if type(action).__name__ != "SetAlarm"]


def awake(**settings) -> World:
    world = World()
    world.deploy(spec(**settings))
    world.arrive()
    world.settle()
    world.log.clear()
    return world


def test_two_requests_wake_a_sleeping_function_once():
    world = World()
    world.deploy(spec())
    first, second = world.arrive(), world.arrive()
    assert kinds(world.log) == ["LoadBlocks"]
    assert kinds(world.load_blocks()) == ["StartWorker"]
    assert kinds(world.ready()) == ["Run"]
    assert kinds(world.finish()) == ["Reply", "Prepare", "Run"]
    world.finish()
    assert [world.answers[id_].start for id_ in (first, second)] == ["disk", "disk"]


def test_the_answer_says_from_where_the_function_woke():
    world = World()
    world.deploy(spec(keep_alive_s=1.0))
    world.arrive()
    world.load_blocks(added=0)
    world.settle()
    warm = world.arrive()
    world.settle()
    world.ring()
    world.settle()
    cold = world.arrive()
    world.settle()
    assert world.answers[1].start == "host"
    assert world.answers[warm].start == "warm"
    assert world.answers[cold].start == "host"


def test_waiting_requests_share_a_run_up_to_the_batch_limit():
    world = awake(max_batch=3)
    for _ in range(5):
        world.arrive()
    world.finish()
    runs = [action.requests for action in world.log if isinstance(action, Run)]
    assert runs == [(2,), (3, 4, 5)]


def test_workers_start_one_at_a_time_up_to_the_limit():
    world = World(cores=4)
    world.deploy(spec(max_workers=3))
    for _ in range(6):
        world.arrive()
    world.load_blocks()
    assert len(world.starting) == 1
    world.ready()
    assert len(world.starting) == 1
    world.ready()
    world.ready()
    assert not world.starting
    assert len(world.running) == 3


def test_a_full_queue_refuses_with_a_time_to_retry_after():
    world = awake(queue_limit=2)
    for _ in range(4):
        world.arrive()
    refusal = world.answers[5]
    assert isinstance(refusal, Refuse)
    assert refusal.error == "OverloadedError"
    assert refusal.retry_after_s >= 1.0


def test_an_idle_worker_is_stopped_after_the_keep_alive_which_restarts_on_reuse():
    world = awake(keep_alive_s=10.0)
    world.now = 6.0
    world.arrive()
    world.finish()
    assert kinds(world.ring()) == []
    assert world.now == 10.0
    assert kinds(world.ring()) == ["StopWorker"]
    assert world.now == 16.0
    world.die()
    assert function_state(world.state.functions["f@1"], world.now) == "asleep"
    assert not world.state.workers


def test_a_request_is_retried_after_a_crash_and_refused_with_a_clear_error_after_a_second_one():
    world = awake()
    request = world.arrive()
    assert kinds(world.die(reason="killed by signal 9")) == []
    world.ring()
    world.settle()
    assert isinstance(world.answers[request], Reply)
    request = world.arrive()
    world.die()
    world.ring()
    world.ready()
    world.die(reason="killed by signal 11")
    refusal = world.answers[request]
    assert refusal.error == "WorkerError"
    assert "signal 11" in refusal.message


def test_the_backoff_doubles_and_ends_with_success():
    world = World(backoff_first_s=1.0, backoff_max_s=3.0, attempts_max=9)
    world.deploy(spec(timeout_s=1000))
    world.arrive()
    world.load_blocks()
    backoffs = []
    for _ in range(4):
        world.die()
        before = world.now
        world.ring()
        backoffs.append(world.now - before)
    world.settle()
    assert backoffs == [1.0, 2.0, 3.0, 3.0]
    assert world.state.functions["f@1"].failures == 0


def test_a_request_past_its_deadline_is_refused_while_it_waits():
    world = awake()
    world.arrive()
    late = world.arrive(deadline=5.0)
    assert kinds(world.ring()) == ["Refuse"]
    assert world.now == 5.0
    assert world.answers[late].error == "DeadlineError"
    world.settle()
    assert isinstance(world.answers[2], Reply)


def test_a_hung_worker_is_killed_and_its_function_serves_again():
    world = awake(timeout_s=5.0)
    world.arrive()
    while world.now < 5.0:
        world.ring()
    assert world.answers[2].error == "DeadlineError"
    assert [a.kill for a in world.log if isinstance(a, StopWorker)] == [True]
    again = world.arrive()
    world.die(min(world.stopping))
    world.ring()
    world.settle()
    assert isinstance(world.answers[again], Reply)


def test_a_new_version_takes_over_only_after_its_trial():
    world = awake()
    world.deploy(spec(version=2, blobs=(("a", 10), ("c", 5))), on_trial=True)
    world.arrive()
    assert next(iter(world.running.values())).requests == (2,)
    world.finish()
    world.load_blocks()
    assert kinds(world.log).count("StartWorker") == 1
    assert kinds(world.ready())[0] == "LoadFinished"
    world.arrive()
    world.arrive(version=1)
    assert sorted(run.worker for run in world.running.values()) == [1, 2]


def test_a_new_version_that_fails_its_trial_leaves_no_trace():
    world = awake()
    world.deploy(spec(version=2, blobs=(("a", 10), ("c", 5))), on_trial=True)
    world.load_blocks()
    actions = world.die(2, reason="bad program")
    assert [a for a in actions if isinstance(a, LoadFinished)][0].reason == "bad program"
    assert [a.addresses for a in actions if isinstance(a, Drop)] == [("c",)]
    world.arrive()
    world.settle()
    assert isinstance(world.answers[2], Reply)
    assert "f@2" not in world.state.functions


def test_a_load_that_fails_refuses_the_request_and_its_function_backs_off():
    world = World()
    world.deploy(spec())
    request = world.arrive()
    world.fail_load()
    assert world.answers[request].error == "NoSpaceError"
    again = world.arrive()
    assert not world.loads
    world.ring()
    world.settle()
    assert isinstance(world.answers[again], Reply)


def test_lost_blocks_are_loaded_again():
    world = awake(keep_alive_s=1.0)
    world.ring()
    world.settle()
    request = world.arrive()
    world.die(lost_blocks=True)
    world.ring()
    assert [load.function for load in world.loads] == ["f@1"]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_an_unload_stops_the_worker_and_drops_the_blocks_and_a_load_wakes_the_function():
    world = awake()
    actions = world.send(UnloadAsked("f@1"))
    assert kinds(actions) == ["StopWorker", "Drop"]
    world.settle()
    refused = world.arrive()
    assert world.answers[refused].error == "OverloadedError"
    assert kinds(world.send(LoadAsked("f@1"))) == ["LoadBlocks"]
    world.load_blocks()
    assert "LoadFinished" in kinds(world.ready())


def test_a_running_request_is_answered_after_an_unload_or_a_removal():
    for event in (UnloadAsked("f@1"), Removed("f@1")):
        world = awake()
        request = world.arrive()
        world.send(event)
        world.settle()
        assert isinstance(world.answers[request], Reply)
        assert not world.alive


def test_only_unshared_blocks_are_dropped():
    world = World()
    for name, blobs in (("f", (("a", 1), ("b", 1))), ("g", (("b", 1), ("c", 1)))):
        world.deploy(spec(name=name, blobs=blobs))
        world.arrive(name)
        world.settle()
    actions = world.send(Removed("f@1"))
    assert [a.addresses for a in actions if isinstance(a, Drop)] == [("a",)]


def test_the_longest_idle_worker_is_stopped_when_the_node_is_full():
    world = World(workers_max=2)
    for name in "fgh":
        world.deploy(spec(name=name))
    for name in "fg":
        world.arrive(name)
        world.settle()
        world.now += 1.0
    request = world.arrive("h")
    world.load_blocks()
    assert world.stopping == {1}
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_busy_full_node_serves_the_waiting_function_when_a_worker_falls_idle():
    world = World(workers_max=1)
    world.deploy(spec(name="f"))
    world.deploy(spec(name="g"))
    world.arrive("f")
    world.load_blocks()
    world.ready()
    request = world.arrive("g")
    world.load_blocks()
    world.finish()
    assert world.stopping == {1}
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_cancelled_request_gets_no_answer():
    world = awake()
    world.arrive()
    second = world.arrive()
    world.send(Cancelled(second))
    world.send(Cancelled(2))
    world.settle()
    assert set(world.answers) == {1}


def test_a_zygote_prepares_each_program_once():
    world = World()
    world.deploy(spec(keep_alive_s=1.0))
    for _ in range(2):
        world.arrive()
        world.settle()
        world.ring()
        world.settle()
    assert sum(isinstance(a, Prepare) for a in world.log) == 1
    world.send(ZygoteLost())
    world.arrive()
    world.settle()
    assert sum(isinstance(a, Prepare) for a in world.log) == 2


def test_the_zygote_of_each_tenant_prepares_a_program_for_itself():
    world = World()
    for name, tenant in (("f", "ada"), ("g", "bob")):
        world.deploy(msgspec.structs.replace(spec(name, tenant=tenant, keep_alive_s=0.0), program="the same"))
    for name in ("f", "g", "f", "g"):
        world.arrive(name)
        world.settle()
        world.ring()
        world.settle()
    assert [action.function for action in world.log if isinstance(action, Prepare)] == ["f@1", "g@1"]
    world.send(ZygoteLost("bob"))
    for name in ("f", "g"):
        world.arrive(name)
        world.settle()
    assert [action.function for action in world.log if isinstance(action, Prepare)][2:] == ["g@1"]


def test_the_program_of_a_function_with_a_handler_is_prepared_too():
    world = World()
    world.deploy(spec(has_handler=True))
    world.arrive()
    world.settle()
    assert any(isinstance(a, Prepare) for a in world.log)


def test_events_of_unknown_runs_workers_and_requests_change_nothing():
    world = awake()
    before = repr(world.state)
    assert world.send(RunEnded(1, 99)) == []
    assert world.send(WorkerReady(77)) == []
    assert world.send(Cancelled(77)) == []
    assert repr(world.state) == before


def test_unknown_names_and_versions_are_distinguished():
    world = awake()
    unknown, version = world.arrive("g"), world.arrive("f", version=7)
    assert "'g'" in world.answers[unknown].message
    assert "its versions: [1]" in world.answers[version].message


def test_the_first_wake_of_the_first_version_is_its_trial():
    world = World()
    assert [type(a) for a in world.deploy(spec(), on_trial=True)] == [LoadBlocks]
    assert isinstance(world.answers.get(world.arrive()), Refuse)
    world.settle()
    request = world.arrive()
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_run_that_ends_after_its_worker_was_stopped_changes_no_answer():
    for event in (UnloadAsked("f@1"), Removed("f@1")):
        world = awake(timeout_s=5.0)
        request = world.arrive()
        world.send(event)
        while not world.stopping:
            world.ring()
        assert world.answers[request].error == "DeadlineError"
        decided = len(world.log)
        world.finish()
        assert not [each for each in world.log[decided:] if isinstance(each, Reply)]
        world.settle()
        assert world.answers[request].error == "DeadlineError"
        assert not world.alive


def test_a_worker_that_does_not_stop_is_killed():
    world = awake(keep_alive_s=1.0)
    world.ring()
    assert [a.kill for a in world.log if isinstance(a, StopWorker)] == [False]
    request = world.arrive()
    world.ring()
    assert [a.kill for a in world.log if isinstance(a, StopWorker)] == [False, True]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_running_requests_deadline_holds_after_unload():
    world = awake()
    request = world.arrive(deadline=1.5)
    world.send(UnloadAsked("f@1"))
    world.ring()
    assert world.now == 1.5
    assert world.answers[request].error == "DeadlineError"


def test_a_busy_function_does_not_starve_another():
    world = World(workers_max=1)
    world.deploy(spec(name="f"))
    world.deploy(spec(name="g"))
    world.arrive("f")
    world.load_blocks()
    world.ready()
    waiting = world.arrive("g")
    world.load_blocks()
    for _ in range(5):
        world.arrive("f")
        if world.running:
            world.finish()
    world.settle()
    assert isinstance(world.answers[waiting], Reply)
    assert len(world.answers) == 7


def test_blocks_that_are_loaded_after_a_removal_are_released():
    world = World()
    world.deploy(spec())
    world.arrive()
    world.send(Removed("f@1"))
    assert [a.addresses for a in world.load_blocks() if isinstance(a, Drop)] == [("a", "b")]
    assert not world.resident


def test_resident_blocks_of_a_restored_function_are_dropped_if_no_other_holds_them():
    world = World()
    world.resident = {("", "a"), ("", "b")}
    world.deploy(spec(name="f", blobs=(("a", 1),)))
    world.deploy(spec(name="g", blobs=(("a", 1), ("b", 1))))
    assert [a.addresses for a in world.send(Removed("g@1")) if isinstance(a, Drop)] == [("b",)]
    request = world.arrive("f")
    assert not world.loads
    world.settle()
    assert world.answers[request].start == "host"


def test_a_slow_program_is_not_warmed_up_in_the_zygote():
    world = World(warm_up_max_s=0.5)
    world.deploy(spec())
    world.arrive()
    world.load_blocks()
    world.ready()
    world.now += 1.0
    assert "Prepare" not in kinds(world.finish())
    world.arrive()
    world.now += 0.1
    assert "Prepare" in kinds(world.finish())


def test_the_zygote_holds_a_limited_number_of_programs_and_forgets_the_one_used_longest_ago():
    world = World(prepared_max=2)
    for name in "fghf":
        if f"{name}@1" not in world.blobs:
            world.deploy(spec(name, keep_alive_s=0.0))
        world.arrive(name)
        world.settle()
        world.ring()
        world.settle()
    prepared = [(action.function, action.forget) for action in world.log if isinstance(action, Prepare)]
    assert prepared == [
        ("f@1", None), ("g@1", None), ("h@1", "program-of-f"), ("f@1", "program-of-g"),
    ]  # fmt: skip


def test_a_program_is_warmed_up_only_by_the_first_trial_of_each_tenant():
    world = World()
    for version in (1, 2):
        world.deploy(spec(version=version), on_trial=True)
        world.settle()
    # A trial reveals nothing of what another tenant has deployed.
    world.deploy(msgspec.structs.replace(spec("g", tenant="u"), program=spec().program), on_trial=True)
    world.settle()
    assert [action.warm_up for action in world.log if isinstance(action, StartWorker)] == [True, False, True]
    assert kinds(world.log).count("LoadFinished") == 3


@pytest.mark.parametrize("event", [Removed, UnloadAsked])
def test_a_deadline_holds_when_the_function_is_removed_or_unloaded(event):
    world = awake()
    request = world.arrive(deadline=3.0)
    world.send(event("f@1"))
    world.ring()
    assert world.now == 3.0
    assert world.answers[request].error == "DeadlineError"


def load_results(world) -> list:
    return [(action.function, action.error) for action in world.log if isinstance(action, LoadFinished)]


def until_loading(world) -> None:
    pass


def until_starting(world) -> None:
    world.load_blocks()


def until_backing_off(world) -> None:
    world.arrive()
    world.load_blocks()
    world.die()
    world.log.clear()
    world.send(LoadAsked("f@1"))


@pytest.mark.parametrize("until", [until_loading, until_starting, until_backing_off])
@pytest.mark.parametrize(
    ("event", "error"),
    [
        (UnloadAsked("f@1"), "ConflictError"),
        (Removed("f@1"), "NotFoundError"),
        (Deployed(spec()), "NotFoundError"),
    ],
)
def test_a_load_is_answered_with_an_error_when_its_function_is_unloaded_removed_or_replaced(until, event, error):
    world = World()
    world.deploy(spec())
    world.send(LoadAsked("f@1"))
    until(world)
    assert not load_results(world)
    world.send(event)
    assert load_results(world) == [("f@1", error)]
    world.settle()
    assert load_results(world) == [("f@1", error)]


def test_a_load_is_answered_with_the_crash_and_the_next_one_with_success():
    world = World()
    world.deploy(spec())
    world.send(LoadAsked("f@1"))
    world.load_blocks()
    world.die()
    assert load_results(world) == [("f@1", "WorkerError")]
    world.send(LoadAsked("f@1"))
    world.ring()
    world.settle()
    assert load_results(world) == [("f@1", "WorkerError"), ("f@1", None)]


def test_a_load_that_comes_while_its_function_is_evicted_is_answered():
    world = World(host_bytes=30)
    world.deploy(spec("f", keep_alive_s=1000.0))
    world.deploy(spec("g", blobs=(("x", 30),)))
    world.arrive("f")
    world.settle()
    world.now = 10.0
    world.arrive("g")
    assert world.stopping, "f is stopped"
    world.send(LoadAsked("f@1"))
    for _ in range(100):
        world.settle()
        if world.alarm is not None:
            world.ring()
    assert load_results(world) == [("f@1", None)]


def test_a_new_version_under_an_old_id_is_another_function():
    world = awake()
    request = world.arrive()
    world.send(Removed("f@1"))
    world.deploy(spec())
    again = world.arrive()
    world.finish()
    assert isinstance(world.answers[request], Reply)
    world.settle()
    assert isinstance(world.answers[again], Reply)


def test_a_request_whose_worker_dies_after_an_unload_is_not_left_waiting():
    world = awake()
    request = world.arrive()
    world.send(UnloadAsked("f@1"))
    world.die()
    assert world.answers[request].error == "OverloadedError"


def test_an_old_load_that_fails_does_not_affect_the_new_one():
    world = World()
    world.deploy(spec())
    world.arrive()
    world.send(UnloadAsked("f@1"))
    world.send(LoadAsked("f@1"))
    request = world.arrive()
    world.fail_load()
    assert request not in world.answers
    assert not [error for _, error in load_results(world) if error]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_an_old_load_that_ends_does_not_complete_the_new_one():
    world = World()
    world.deploy(spec())
    world.arrive()
    world.send(UnloadAsked("f@1"))
    world.send(LoadAsked("f@1"))
    world.load_blocks()
    assert not world.starting, "what the new one brings is not there yet"
    world.load_blocks()
    assert world.starting

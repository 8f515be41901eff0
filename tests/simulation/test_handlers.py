"""Simulated handlers run in workers and call their programs on devices, as on a node."""

import io
from math import inf, nan

import pytest

from overwinter.core.actions import Refuse, Reply, Run, RunOnDevice, StopWorker
from overwinter.core.events import Arrived, Cancelled, RunEnded
from overwinter.core.journal import read_journal
from overwinter.simulation.models import MIB
from overwinter.simulation.world import World
from tests.replay.replayed import replayed
from tests.simulation.scenes import function, scene
from tests.simulation.test_pool import FAULTS, SMALL

HANDLER = {"before_ms": {"1": 3}, "after_ms": {"1": 1}, "blocks": [{"mib": 1, "shared": "code"}]}
APPLICATION = {
    "name": "both",
    "stages": {"first": {"function": "f"}, "second": {"function": "g", "inputs": {"input": "first:output"}}},
    "workload": {"kind": "poisson", "rate": 2.0},
}


def handled(settings=None, **changes):
    """Return a function with a handler, whose program runs on the pool."""
    settings = {"device": "pool", "timeout_s": 20} | (settings or {})
    return function(**({"settings": settings, "latency_ms": {"1": 10}, "handler": HANDLER} | changes))


def scenario(*functions, faults=None, **changes):
    return scene(*functions, **({"devices": SMALL, "faults": faults or {}, "duration_s": 20.0, "seed": 3} | changes))


def recorded(scenario):
    """Run a scenario, and return its report and its steps."""
    file = io.BytesIO()
    report = World(scenario, journal=file, checked=True).run()
    file.seek(0)
    return report, list(read_journal(file)[1])


def of(steps, *kinds):
    """Return the events and actions of these kinds."""
    return [each for step in steps for each in (step.event, *step.actions) if isinstance(each, kinds)]


def calls_of(steps):
    return [each for each in of(steps, Arrived) if each.caller is not None]


def test_each_request_runs_in_a_worker_which_calls_the_program_on_a_device():
    report, steps = recorded(scenario(handled()))
    total = report.total
    assert total.answered == total.requests > 20
    calls = calls_of(steps)
    assert {each.name for each in calls} == {"f:program"}
    runs = {(each.worker, each.run): each.requests for each in of(steps, Run)}
    assert [each.caller for each in calls] == list(runs)
    on_device = [each for each in of(steps, RunOnDevice) if each.requests]
    assert [each.requests for each in on_device] == [(each.request,) for each in calls]
    assert {each.function for each in on_device} == {"f:program@1"}
    assert list(report.functions) == ["f"]
    # The handler's parts, and the program.
    assert total.p50_ms == pytest.approx(3 + 10 + 1, rel=0.1)
    assert total.device_seconds > 0.01 * total.requests
    assert total.busy_core_s > total.device_seconds


def test_the_handler_has_its_own_blocks_and_memory():
    world = World(scenario(handled(worker_mib=50.0)))
    report = world.run()
    assert report.memory.workers_peak >= 50 * MIB
    assert report.total.loaded_bytes == (30 + 1 + 1) * MIB
    assert world.executors.moved_bytes == 31 * MIB


def test_the_requests_of_a_run_make_one_call_which_takes_longer_than_a_single_request():
    batches = {"latency_ms": {"1": 10, "8": 45}, "rate": 120.0}
    report, steps = recorded(scenario(handled({"max_batch": 8, "max_workers": 1}, **batches)))
    assert report.total.answered == report.total.requests
    calls = calls_of(steps)
    assert len(calls) == len(of(steps, Run)) < 0.8 * report.total.requests
    runs = len([each for each in of(steps, RunOnDevice) if each.requests])
    assert report.total.device_seconds > 1.2 * 0.01 * runs


def test_the_functions_of_a_shared_run_call_their_programs_one_after_the_other():
    siblings = handled({"max_batch": 8, "max_workers": 1}, variants=4, rate=40.0)
    report, steps = recorded(scenario(siblings))
    assert report.total.answered == report.total.requests
    shared = {(each.worker, each.run): set(each.functions) for each in of(steps, Run) if each.functions}
    assert shared
    calls = calls_of(steps)
    for caller, functions in shared.items():
        called = [f"{each.name.removesuffix(':program')}@1" for each in calls if each.caller == caller]
        assert sorted(called) == sorted(functions)
    open_calls = set()
    for step in steps:
        if isinstance(step.event, Arrived) and step.event.caller is not None:
            assert step.event.caller not in open_calls
            open_calls.add(step.event.caller)
        ended = {each.request for each in step.actions if isinstance(each, Reply | Refuse)}
        open_calls -= {each.caller for each in calls if each.request in ended}


def test_a_call_that_nobody_waits_for_is_cancelled_and_no_worker_is_killed():
    slow = handled({"timeout_s": 0.5, "queue_limit": 4, "max_workers": 4}, latency_ms={"1": 300}, rate=12.0)
    report, steps = recorded(scenario(slow))
    assert report.total.lost == 0
    assert 0 < report.total.answered < report.total.requests
    assert report.total.refused["DeadlineError"] > 10
    cancelled = {each.request for each in of(steps, Cancelled)}
    assert cancelled
    assert cancelled <= {each.request for each in calls_of(steps)}
    assert not [each for each in of(steps, StopWorker) if each.kill]


def test_the_requests_of_a_run_whose_call_failed_get_the_reason_for_the_failure():
    dying = {"run_crash_share": 0.0, "executor_life_s": 0.3}
    models = handled({"max_batch": 4}, latency_ms={"1": 150}, rate=20.0)
    report, steps = recorded(scenario(models, faults=dying))
    assert report.total.lost == 0
    refused = {each.request: each for each in of(steps, Refuse)}
    failures = [failure for ended in of(steps, RunEnded) for failure in ended.failures]
    reasons = {each.message for each in failures if each.error == "WorkerError"}
    assert any("killed by a fault" in each or "died" in each for each in reasons)
    assert not any(":program" in each for each in reasons)
    answers = [(refused[each.request].error, each.error) for each in failures if each.request in refused]
    assert answers
    assert all(given in (failed, "DeadlineError") for given, failed in answers)
    assert any(given == failed for given, failed in answers)


@pytest.mark.parametrize("faults", [None, FAULTS | {"worker_life_s": 5.0}], ids=["sound", "faults"])
@pytest.mark.parametrize("policy", [{}, {"device_binding": "torpor"}, {"joins": False}])
def test_no_request_is_lost_and_the_journal_replays(tmp_path, faults, policy):
    models = (
        handled({"max_batch": 4}, name="f", rate=30.0, jitter=0.1),
        handled(name="g", variants=2, rate=10.0),
        either(20.0, name="h", variants=2),
    )
    made = scenario(*models, faults=faults, scheduler={"policy": policy})
    journals = tmp_path / "one", tmp_path / "other"
    for path in journals:
        with path.open("wb") as file:
            report = World(made, journal=file, checked=True).run()
    assert report.total.lost == 0
    assert report.total.answered > 0.9 * report.total.requests
    assert journals[0].read_bytes() == journals[1].read_bytes()
    assert replayed(journals[0])


def either(rate, settings=None, **changes):
    """Return a function with a handler, whose program takes 40 ms in its worker and 10 ms on a device."""
    settings = {"device": "any", "max_workers": 8} | (settings or {})
    return handled(settings, latency_ms={"1": 40}, device_ms={"1": 10}, rate=rate, **changes)


def test_with_device_any_each_call_is_answered_by_a_device_or_by_the_calling_worker():
    report, steps = recorded(scenario(either(75.0), node={"cores": 2}))
    assert report.total.lost == 0
    assert report.total.answered == report.total.requests > 1000
    calls = calls_of(steps)
    assert len(calls) == len(of(steps, Run))
    on_device = {request for each in of(steps, RunOnDevice) for request in each.requests}
    left = {each.request for each in of(steps, Refuse)} & {each.request for each in calls}
    assert {each.request for each in calls} == on_device | left
    assert on_device
    assert left
    program_s = [each.program_s for each in of(steps, RunEnded) if each.program_s]
    assert len(program_s) == len(left)
    # Longer where more workers than cores compute.
    assert min(program_s) == pytest.approx(0.04)


def test_with_device_any_a_worker_runs_handler_and_program_if_there_are_no_devices():
    report, steps = recorded(scenario(either(5.0), devices=()))
    assert report.total.answered == report.total.requests > 50
    assert not calls_of(steps)
    # The handler's parts, and the program.
    assert report.total.p50_ms == pytest.approx(3 + 40 + 1, rel=0.1)


def test_with_device_any_a_slow_device_gets_few_calls():
    report, steps = recorded(scenario(handled({"device": "any"}, device_ms={"1": 400}, rate=10.0)))
    assert report.total.answered == report.total.requests
    assert len([each for each in of(steps, RunOnDevice) if each.requests]) < 0.1 * report.total.requests


def test_functions_with_handlers_may_be_stages_of_an_application():
    silent = {"workload": None}
    report, _ = recorded(scenario(handled(**silent), handled(name="g", **silent), applications=[APPLICATION]))
    assert report.applications["both"].answered == report.applications["both"].requests > 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"device": "cpu"}}, 'handler needs device = "pool"'),
        ({"settings": {"device": "any"}, "handler": None, "has_handler": True}, 'device = "any" needs the times'),
        ({"handler": None, "has_handler": True}, "give handler"),
        ({"handler": {"before_ms": {}}}, r"before_ms needs a time.*functions\[0\]\.handler"),
        ({"handler": {"before_ms": {"1": 3}, "after_ms": {"0": 1}}}, "after_ms needs batch sizes"),
        ({"handler": {"before_ms": {"1": 3, "2": nan}}}, "before_ms needs batch sizes of at least 1, and finite times"),
        (
            {"handler": {"before_ms": {"1": 3}, "after_ms": {"1": inf}}},
            "after_ms needs batch sizes",
        ),
        (
            {"handler": {"before_ms": {"1": 3}, "after_ms": {"1": nan}}},
            "after_ms needs batch sizes",
        ),
        ({"handler": {"before_ms": {"1": 3}, "during_ms": {"1": 1}}}, "during_ms"),
        ({"name": "f:program"}, "without @ and :"),
    ],
)
def test_errors_name_what_is_wrong(changes, said):
    with pytest.raises(ValueError, match=said):
        scenario(handled(**changes))

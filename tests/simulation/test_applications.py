"""Applications in a scenario: each stage after its inputs, no lost request, one SLO for the whole."""

import io
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.actions import Refuse, Reply
from overwinter.core.errors import CallerError
from overwinter.core.events import Arrived, Cancelled
from overwinter.core.journal import read_journal
from overwinter.simulation.applications import Applications
from overwinter.simulation.scenario import read_scenario, scenario_of
from overwinter.simulation.world import World
from tests.simulation.scenes import function

TETRIS = sorted((Path(__file__).parent.parent.parent / "scenarios" / "tetris").glob("*.toml"))
DIAMOND = {
    "first": {"function": "a", "inputs": {"x": "input:x"}},
    "left": {"function": "b", "inputs": {"x": "first:y"}},
    "right": {"function": "b", "inputs": {"x": "first:y"}},
    "last": {"function": "c", "inputs": {"x": "left:y", "z": "right:y"}},
}


def stage_function(name, **changes):
    table = function(name, **changes)
    del table["workload"]
    return table


def application(name="app", rate=4.0, stages=DIAMOND, **changes):
    return {"name": name, "slo_ms": 2000, "stages": stages, "workload": {"kind": "poisson", "rate": rate}} | changes


def diamond(more=(), **changes):
    given = {"functions": [stage_function(name) for name in "abc"] + list(more), "applications": [application()]}
    return scenario_of({"duration_s": 30, "node": {"cores": 8}} | given | changes)


def steps_of(scenario):
    file = io.BytesIO()
    report = World(scenario, journal=file, checked=True).run()
    file.seek(0)
    return report, list(read_journal(file)[1])


def test_each_stage_is_called_once_and_after_all_stages_that_it_needs():
    report, steps = steps_of(diamond(applications=[application(rate=0.2)], seed=2))
    order = [step.event.name for step in steps if isinstance(step.event, Arrived)]
    count = report.applications["app"].requests
    assert count > 2
    assert order == ["a", "b", "b", "c"] * count
    open_ = set()
    for step in steps:
        if isinstance(step.event, Arrived):
            assert not open_ if step.event.name in "ac" else len(open_) <= 1
            open_.add(step.event.request)
        open_ -= {action.request for action in step.actions if isinstance(action, Reply)}


def test_requests_of_applications_are_counted_and_those_of_their_stages_too():
    report, _ = steps_of(diamond())
    whole = report.applications["app"]
    assert whole.requests == whole.answered > 80
    assert (whole.lost, whole.refused) == (0, {})
    assert report.total.requests == report.total.answered == 4 * whole.requests
    assert whole.attainment > 0.9
    assert whole.p50_ms > 3 * 50


def test_the_slo_of_an_application_is_that_of_the_whole_and_not_of_each_stage():
    report, _ = steps_of(diamond(applications=[application(slo_ms=140)]))
    assert report.applications["app"].attainment == 0
    assert report.functions["a"].attainment > 0.9


def test_a_scenario_may_have_functions_with_workloads_besides_its_applications():
    report, _ = steps_of(diamond([function("d")]))
    assert report.functions["d"].requests > 20
    assert report.total.requests == 4 * report.applications["app"].requests + report.functions["d"].requests


def test_all_stages_have_the_deadline_of_the_request_for_their_application():
    _, steps = steps_of(diamond(applications=[application(timeout_s=7)]))
    arrived = [step for step in steps if isinstance(step.event, Arrived)]
    first = {step.event.deadline for step in arrived if step.event.name == "a"}
    assert {step.event.deadline for step in arrived} == first
    assert all(step.event.deadline == step.now + 7 for step in arrived if step.event.name == "a")


def test_at_the_deadline_no_further_stage_is_called_and_the_request_is_refused():
    [app] = diamond(applications=[application(timeout_s=7)]).applications
    applications = Applications([app], count(1), 0.0, {})
    [first] = applications.arrived("app", 10.0)
    assert applications.answered(first.request, 17.0) == []
    assert applications.figures()["app"].refused == {"DeadlineError": 1}
    assert applications.open_stages == 0


def test_a_stage_calls_the_version_that_it_names():
    pinned = DIAMOND | {"first": DIAMOND["first"] | {"version": 1}}
    report, steps = steps_of(diamond(applications=[application(rate=0.5, stages=pinned)]))
    asked = {(step.event.name, step.event.version) for step in steps if isinstance(step.event, Arrived)}
    assert asked == {("a", 1), ("b", None), ("c", None)}
    assert report.applications["app"].requests == report.applications["app"].answered > 2


def test_a_refused_stage_ends_the_request_and_the_other_stages_are_cancelled():
    narrow = stage_function("b", settings={"queue_limit": 1, "max_workers": 1})
    stages = {
        "left": {"function": "a", "inputs": {"x": "input:x"}},
        "right": {"function": "b", "inputs": {"x": "input:x"}},
    }
    app = application(rate=40.0, stages=stages)
    report, steps = steps_of(diamond(functions=[stage_function("a"), narrow], applications=[app], duration_s=10))
    whole = report.applications["app"]
    assert whole.refused["OverloadedError"] > 0
    assert whole.lost == 0
    assert whole.answered + sum(whole.refused.values()) == whole.requests
    assert any(isinstance(step.event, Cancelled) for step in steps)
    assert report.total.lost == 0


def test_requests_that_arrive_before_settle_s_are_served_and_not_counted():
    whole, _ = steps_of(diamond())
    late, _ = steps_of(diamond(settle_s=15))
    assert 0 < late.applications["app"].requests < whole.applications["app"].requests
    assert late.total.requests == whole.total.requests
    assert late.applications["app"].lost == 0


def test_the_same_seed_gives_the_same_journal():
    files = [io.BytesIO(), io.BytesIO()]
    reports = [World(diamond(), journal=file).run() for file in files]
    assert files[0].getvalue() == files[1].getvalue()
    assert reports[0] == reports[1]


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.3]), st.sampled_from([None, 3.0]), st.integers(1, 4))
def test_no_request_is_lost_whatever_fails(seed, crashes, zygote_s, workers_max):
    faults = {"run_crash_share": crashes, "start_crash_share": crashes}
    scenario = diamond(
        seed=seed,
        duration_s=6,
        scheduler={"workers_max": workers_max},
        faults=faults | ({"zygote_life_s": zygote_s} if zygote_s else {}),
        applications=[application(timeout_s=2)],
    )
    report, steps = steps_of(scenario)
    whole = report.applications["app"]
    assert whole.lost == report.total.lost == 0
    assert whole.answered + sum(whole.refused.values()) == whole.requests
    result = [action.request for step in steps for action in step.actions if isinstance(action, Reply | Refuse)]
    assert len(result) == len(set(result))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"applications": [application(stages={"s": {"function": "no", "inputs": {"x": "input:x"}}})]}, "no"),
        (
            {"applications": [application(stages={"s": {"function": "a", "version": 2, "inputs": {"x": "input:x"}}})]},
            "a@2",
        ),
        ({"applications": [application("a")]}, "the name of a function"),
        ({"applications": []}, "nothing calls a, b, c"),
        ({"applications": [application(stages={})]}, "length >= 1"),
        ({"applications": [application(stages={"s": {"function": "a", "inputs": {"x": "s:y"}}})]}, "each other"),
        ({"applications": [application(stages={"s": {"function": "a", "inputs": {"x": "t:y"}}})]}, "t:y"),
    ],
)
def test_a_scenario_with_invalid_applications_is_refused(changes, word):
    with pytest.raises(msgspec.ValidationError, match=word):
        diamond(**changes)


def test_copies_of_an_application_are_refused():
    with pytest.raises(CallerError, match="applications"):
        diamond().multiplied(2)


@pytest.mark.parametrize("path", TETRIS, ids=lambda path: path.stem)
def test_the_applications_of_tetris_are_served(path):
    report = World(msgspec.structs.replace(read_scenario(path), duration_s=8.0, settle_s=0.0), checked=True).run()
    [whole] = report.applications.values()
    assert whole.requests == whole.answered > 5
    assert report.samples[-1].worker_cores > 0


def test_the_oracle_knows_the_requests_that_applications_send():
    called = {"name": "f", "blocks": [{"mib": 10}], "latency_ms": {1: 100}, "settings": {"max_workers": 8}}
    stages = {"one": {"function": "f", "inputs": {"x": "input:x"}}}
    application = {"name": "app", "slo_ms": 300, "stages": stages, "workload": {"kind": "poisson", "rate": 25.0}}
    made = scenario_of(
        {
            "duration_s": 100,
            "node": {"cores": 16},
            "functions": [called],
            "applications": [application],
            "scheduler": {"policy": "oracle"},
        }
    )
    figures = World(made, checked=True).run().applications["app"]
    assert figures.attainment > 0.95

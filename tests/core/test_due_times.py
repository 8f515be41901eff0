"""The due time of each stage of a pipeline leaves the following stages the time that they may take."""

from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.due_times import due_times
from overwinter.core.pipeline import Pipeline, Stage, needs
from tests.core.graphs import graphs

CHAIN = {
    "listen": Stage(function="stt", inputs={"x": "input:x"}),
    "answer": Stage(function="qa", inputs={"x": "listen:y"}),
    "speak": Stage(function="tts", inputs={"x": "answer:y"}),
}


def test_the_slo_of_a_pipeline_is_divided_in_proportion_to_the_slos_of_its_functions() -> None:
    slos = {"listen": 300.0, "answer": 100.0, "speak": 400.0}
    assert due_times(CHAIN, 1600.0, slos, 10.0) == {"listen": 10.6, "answer": 10.8, "speak": 11.6}


def test_if_one_function_has_no_slo_all_stages_get_the_same_time() -> None:
    assert due_times(CHAIN, 3000.0, {"listen": 1.0, "answer": None, "speak": 9.0}, 0.0) == {
        "listen": 1.0,
        "answer": 2.0,
        "speak": 3.0,
    }


def test_without_an_slo_of_the_pipeline_no_stage_has_a_due_time() -> None:
    assert due_times(CHAIN, None, dict.fromkeys(CHAIN, 10.0), 0.0) == {}


@given(graphs(), st.data())
def test_a_stage_is_due_early_enough_for_each_stage_that_needs_it(pipeline: Pipeline, data: st.DataObject) -> None:
    slos = {name: data.draw(st.floats(1.0, 1000.0)) for name in pipeline.stages}
    due = due_times(pipeline.stages, 500.0, slos, 0.0)
    assert max(due.values()) == 0.5
    longest = sum(slos.values())
    for name, stage in pipeline.stages.items():
        assert 0.0 < due[name] <= 0.5
        for before in needs(stage):
            assert due[before] <= due[name] - 0.5 * slos[name] / longest + 1e-9

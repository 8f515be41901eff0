"""The report of a thousand functions matches the outcomes of their requests."""

from benchmarks.openloop import Outcome
from benchmarks.thousand_report import Base, LoadResult, MemorySample, figures
from benchmarks.traffic import Cost

SLO_S = [0.1, 0.1]
BASE = Base("mlp", Cost(0.01, 0.02), 1 << 20, 1 << 19, b"", {0: None, 1: None})


def answered(start: str, seconds: float = 0.05) -> Outcome:
    return Outcome(0, 0.0, 0.0, seconds, 200, start, True)


def test_a_wake_and_a_bind_are_distinguished():
    outcomes = [answered(start) for start in ("warm", "bound", "bound", "host", "disk", "warm", "warm", "warm")]
    done = LoadResult(0.55, [*outcomes, Outcome(1, 0.0, 0.0, 0.0, 503, "it is full", False)], MemorySample())
    assert (done.wakes, done.binds, done.wake_share) == (2, 2, 0.25)


def test_figures_of_the_first_load_have_plain_names_and_those_of_other_loads_name_their_load():
    light = LoadResult(0.55, [answered("warm"), answered("host")], MemorySample(3 << 20))
    heavy = LoadResult(
        0.75, [answered("warm"), answered("warm", 0.2), Outcome(1, 0.0, 0.0, 9.0, 0, "", False)], MemorySample(5 << 20)
    )
    found = figures([BASE], [light, heavy], SLO_S)
    assert (found["requests"], found["answered"], found["lost"], found["attainment"]) == (2, 2, 0, 1.0)
    assert (found["attainment_75"], found["wake_share_75"], found["lost_75"]) == (1 / 3, 0.0, 1)
    assert (found["wake_share"], found["peak_mib"]) == (0.5, 5.0)
    assert (found["loaded_mib"], found["weights_mib"]) == (2.0, 1.0)

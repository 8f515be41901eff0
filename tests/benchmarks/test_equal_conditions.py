"""After the last condition a baseline has Overwinter's conditions and still its own rules."""

from itertools import pairwise

import msgspec
import pytest

from benchmarks.equal_conditions import IMMEDIATE, OURS, PAPER, SHARING, THRESHOLDS, WORKERS, with_conditions
from benchmarks.tetris import equal_conditions
from overwinter.core.policies import POLICIES

RULES = ("scaling", "rate", "batching", "keep_alive", "order", "core_mib", "cores_max", "batch_max")
CONDITIONS = ("shares", "eager", "alpha", "beta", "period_s")


@pytest.mark.parametrize("name", ["infless", "photons", "tetris", "mls"])
def test_conditions_become_ours_and_rules_stay(name):
    first, *_, last = with_conditions(POLICIES[name], (PAPER, WORKERS, SHARING, IMMEDIATE, THRESHOLDS))
    assert (first.policy, first.own_workers, last.own_workers) == (POLICIES[name], False, True)
    assert [getattr(last.policy, field) for field in CONDITIONS] == [getattr(OURS, field) for field in CONDITIONS]
    assert [getattr(last.policy, field) for field in RULES] == [getattr(POLICIES[name], field) for field in RULES]


@pytest.mark.parametrize("name", ["infless", "photons"])
def test_each_step_changes_one_condition(name):
    steps = [contender for _, contender in equal_conditions.with_each_condition(name)]
    for before, after in pairwise(steps):
        were, are = (msgspec.structs.asdict(each.policy) | {"own": each.own_workers} for each in (before, after))
        changed = {field for field in are if are[field] != were[field]}
        assert changed in ({"own"}, {"shares"}, {"eager"}, {"alpha", "beta"})


def test_a_headline_figure_comes_with_the_figure_under_equal_conditions():
    ours = equal_conditions.Cell(memory=(50.0, 60.0), cores=(1.0, 1.0), violations=(0.0, 0.0))
    theirs = [equal_conditions.Cell((mib, mib), (1.0, 1.0), (0.1, 0.3)) for mib in (1000.0, 500.0, 200.0, 120.0, 100.0)]
    row = {
        contender: cell
        for (_, contender), cell in zip(equal_conditions.with_each_condition("infless"), theirs, strict=True)
    }
    results = equal_conditions.headline({**row, equal_conditions.OURS: ours}, "infless")
    assert results["as_in_paper"] == pytest.approx(0.945)
    assert results["equal"] == pytest.approx(0.45)
    assert results["equal_spread"] == pytest.approx([0.4, 0.5])

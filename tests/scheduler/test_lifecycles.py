"""A change to which no listed transitions lead is an error, and the docs show the same tables."""

from pathlib import Path

import pytest

from tests.scheduler.transitions import BLOCKS, FUNCTION, WORKER, LifecycleStates, check_steps, diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
TABLES = [FUNCTION, BLOCKS, WORKER]


def lifecycle_states(function="asleep", blocks="absent", worker="idle") -> LifecycleStates:
    return LifecycleStates({"f@1": (function, blocks)}, {1: worker})


def test_one_event_may_cause_several_transitions():
    check_steps(lifecycle_states("asleep"), lifecycle_states("waking"))
    check_steps(lifecycle_states("awake"), lifecycle_states("waking"))
    check_steps(lifecycle_states(worker="starting"), lifecycle_states(worker="draining"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lifecycle_states(worker="stopping"), lifecycle_states(worker="idle")),
        (lifecycle_states(worker="idle"), lifecycle_states(worker="starting")),
    ],
)
def test_a_change_that_no_transitions_lead_to_is_an_error(before, after):
    with pytest.raises(AssertionError, match="was"):
        check_steps(before, after)


@pytest.mark.parametrize("table", TABLES)
def test_every_state_can_be_reached_and_left(table):
    states, left = {*table.values(), *(state for state, _ in table)}, {state for state, _ in table}
    reached = {next(iter(table))[0]}
    for _ in table:
        reached |= {after for (before, _), after in table.items() if before in reached}
    assert reached == states
    assert states - left <= {"stopping"}


def test_the_diagrams_in_the_docs_are_made_from_the_tables():
    assert diagram() in ARCHITECTURE.read_text()

"""A change to which no listed transitions lead is an error, and the docs show the same tables."""

from pathlib import Path

import pytest

from overwinter.core.events import Alarm, BlocksLoaded, LoadAsked, RunEnded, WorkerReady
from tests.scheduler.transitions import BLOCKS, FUNCTION, WORKER, LifecycleStates, check_steps, diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
TABLES = [FUNCTION, BLOCKS, WORKER]


def lifecycle_states(function="asleep", blocks="absent", worker="idle") -> LifecycleStates:
    return LifecycleStates({"f@1": (function, blocks)}, {1: worker})


def test_one_event_may_cause_several_transitions():
    check_steps(lifecycle_states("asleep"), lifecycle_states("waking"), Alarm())
    check_steps(lifecycle_states("awake"), lifecycle_states("waking"), Alarm())
    check_steps(lifecycle_states(worker="starting"), lifecycle_states(worker="draining"), WorkerReady(1))
    check_steps(lifecycle_states(blocks="loading"), lifecycle_states(blocks="present"), BlocksLoaded("f@1", 1, 0))
    check_steps(lifecycle_states("unloaded"), lifecycle_states("waking"), LoadAsked("f@1"))
    check_steps(lifecycle_states(worker="busy"), lifecycle_states(worker="idle"), RunEnded(1, 1))


@pytest.mark.parametrize(
    ("before", "after", "event"),
    [
        (lifecycle_states(worker="stopping"), lifecycle_states(worker="idle"), RunEnded(1, 1)),
        (lifecycle_states(worker="idle"), lifecycle_states(worker="starting"), WorkerReady(1)),
        (lifecycle_states(worker="starting"), lifecycle_states(worker="idle"), WorkerReady(2)),
        (lifecycle_states(worker="busy"), lifecycle_states(worker="idle"), RunEnded(2, 1)),
        (lifecycle_states(blocks="loading"), lifecycle_states(blocks="present"), BlocksLoaded("g@1", 1, 0)),
        (lifecycle_states(blocks="absent"), lifecycle_states(blocks="present"), Alarm()),
        (lifecycle_states("unloaded"), lifecycle_states("asleep"), LoadAsked("g@1")),
        (lifecycle_states("unloaded"), lifecycle_states("awake"), Alarm()),
        (lifecycle_states("backoff"), lifecycle_states("awake"), Alarm()),
    ],
)
def test_a_change_that_no_transitions_lead_to_is_an_error(before, after, event):
    with pytest.raises(AssertionError, match="w(as|ere)"):
        check_steps(before, after, event)


@pytest.mark.parametrize("table", TABLES)
def test_every_state_can_be_reached_and_every_state_but_stopping_can_be_left(table):
    states, left = {*table.values(), *(state for state, _ in table)}, {state for state, _ in table}
    reached = {next(iter(table))[0]}
    for _ in table:
        reached |= {after for (before, _), after in table.items() if before in reached}
    assert reached == states
    assert states - left <= {"stopping"}


def test_the_diagrams_in_the_docs_are_made_from_the_tables():
    assert diagram() in ARCHITECTURE.read_text()

"""States follow from facts, only the listed transitions happen, and the docs show the same tables."""

from pathlib import Path

import pytest

from tests.scheduler.transitions import BLOCKS, FUNCTION, WORKER, Lives, check_steps, diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
TABLES = [FUNCTION, BLOCKS, WORKER]


def lives(function="asleep", blocks="absent", worker="idle") -> Lives:
    return Lives({"f@1": (function, blocks)}, {1: worker})


def test_what_one_event_does_are_few_steps():
    check_steps(lives("asleep"), lives("waking"))
    check_steps(lives("awake"), lives("waking"))
    check_steps(lives(worker="starting"), lives(worker="draining"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lives(worker="stopping"), lives(worker="idle")),
        (lives(worker="idle"), lives(worker="starting")),
    ],
)
def test_what_no_table_has_is_an_error(before, after):
    with pytest.raises(AssertionError, match="was"):
        check_steps(before, after)


@pytest.mark.parametrize("table", TABLES)
def test_every_state_can_be_reached_and_left(table):
    entered, left = set(table.values()), {state for state, _ in table}
    first = next(iter(table))[0]
    assert left <= entered | {first}
    assert entered - left <= {"stopping"}


def test_the_diagrams_in_the_docs_are_made_from_the_tables():
    assert diagram() in ARCHITECTURE.read_text()

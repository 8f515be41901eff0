"""The tables allow what they list and nothing else, and the docs show them as they are."""

from pathlib import Path

import pytest

from overwinter.policy import lifecycles

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
TABLES = [
    (lifecycles.FUNCTION, lifecycles.step_function),
    (lifecycles.BLOCKS, lifecycles.step_blocks),
    (lifecycles.BODY, lifecycles.step_body),
]


@pytest.mark.parametrize(("table", "step"), TABLES)
def test_a_missing_pair_is_an_error(table, step):
    events = {event for _, event in table}
    for state in {state for state, _ in table}:
        for event in events:
            if (state, event) in table:
                assert step(state, event) == table[state, event]
            else:
                with pytest.raises(lifecycles.LifecycleError, match=event):
                    step(state, event)


@pytest.mark.parametrize(("table", "_"), TABLES)
def test_every_state_can_be_reached_and_left(table, _):
    entered, left = set(table.values()), {state for state, _ in table}
    first = next(iter(table))[0]
    assert left <= entered | {first}
    assert entered - left <= {"stopping"}


def test_the_diagrams_in_the_docs_are_made_from_the_tables():
    assert lifecycles.diagram() in ARCHITECTURE.read_text()

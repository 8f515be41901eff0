"""The order in which requests wait."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from overwinter.scheduler.policies.queueing import late_last
from overwinter.scheduler.request import Request


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 10)), max_size=12),
    st.integers(0, 10),
    st.booleans(),
)
def test_the_late_go_behind_those_of_their_level_and_nothing_else_moves(made, before, late_first):
    made = sorted(made)
    requests = {id_: Request(id_, "f", "t", due, 99.0, level, due) for id_, (level, due) in enumerate(made)}
    queue = deque(requests)
    late_last(queue, requests, before, late_first)
    assert [requests[id_].level for id_ in queue] == [level for level, _ in made]
    assert sorted(queue) == sorted(requests)
    first = [id_ for id_ in queue if requests[id_].level == made[0][0]]
    lateness = [requests[id_].due < before for id_ in first]
    assert lateness == sorted(lateness, reverse=late_first)
    for late in (True, False):
        same = [id_ for id_ in first if (requests[id_].due < before) == late]
        assert same == sorted(same)
    assert list(queue)[len(first) :] == sorted(requests)[len(first) :]

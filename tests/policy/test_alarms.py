"""One alarm a key, the earliest; and the node is only told when it must ring earlier than it knew."""

from hypothesis import given
from hypothesis import strategies as st

from overwinter.policy.alarms import Alarms

times = st.floats(0, 100)


@given(st.lists(st.tuples(st.integers(0, 5), times)))
def test_every_key_is_looked_at_at_its_earliest_time(wishes):
    alarms = Alarms()
    for key, at in wishes:
        alarms.watch(key, at)
    earliest = {key: min(at for k, at in wishes if k == key) for key, _ in wishes}
    rung = {}
    while (at := alarms.due_change()) is not None:
        for key in alarms.pop_due(at):
            assert key not in rung
            rung[key] = at
    assert rung == earliest


def test_a_later_wish_changes_nothing_and_an_earlier_one_is_told():
    alarms = Alarms()
    alarms.watch("f", 5.0)
    assert alarms.due_change() == 5.0
    alarms.watch("g", 9.0)
    assert alarms.due_change() is None
    alarms.watch("h", 2.0)
    assert alarms.due_change() == 2.0


def test_an_alarm_that_rings_too_early_is_set_again():
    alarms = Alarms()
    alarms.watch("f", 5.0)
    alarms.due_change()
    assert alarms.pop_due(4.999) == []
    assert alarms.due_change() == 5.0


def test_a_forgotten_key_is_not_looked_at():
    alarms = Alarms()
    alarms.watch("f", 5.0)
    alarms.forget("f")
    assert alarms.due_change() is None
    assert alarms.pop_due(9.0) == []

"""One time per key, the earliest; the node gets a new alarm only if it must be earlier."""

from hypothesis import given
from hypothesis import strategies as st

from overwinter.scheduler.timers import Timers

times = st.floats(0, 100)


@given(st.lists(st.tuples(st.integers(0, 5), times)))
def test_every_key_is_due_once_at_its_earliest_time(wishes):
    timers = Timers()
    for key, at in wishes:
        timers.arm(key, at)
    earliest = {key: min(at for k, at in wishes if k == key) for key, _ in wishes}
    rung = {}
    while (at := timers.next_alarm()) is not None:
        for key in timers.pop_due(at, 100):
            assert key not in rung
            rung[key] = at
    assert rung == earliest


def test_a_later_time_changes_nothing_and_an_earlier_one_moves_the_alarm():
    timers = Timers()
    timers.arm("f", 5.0)
    assert timers.next_alarm() == 5.0
    timers.arm("g", 9.0)
    assert timers.next_alarm() is None
    timers.arm("h", 2.0)
    assert timers.next_alarm() == 2.0


def test_an_alarm_that_rings_too_early_is_set_again():
    timers = Timers()
    timers.arm("f", 5.0)
    timers.next_alarm()
    assert timers.pop_due(4.999, 100) == []
    assert timers.next_alarm() == 5.0


def test_a_disarmed_key_is_not_due_and_sets_no_alarm():
    timers = Timers()
    timers.arm("f", 5.0)
    timers.disarm("f")
    assert timers.next_alarm() is None
    assert timers.pop_due(9.0, 100) == []


def test_a_step_takes_some_of_the_keys_that_are_due_and_later_steps_take_the_others():
    timers = Timers()
    for number in range(5):
        timers.arm(f"f{number}", 5.0)
    assert timers.next_alarm() == 5.0
    taken = [timers.pop_due(6.0, 2)]
    while timers.next_alarm() == 5.0:
        taken.append(timers.pop_due(6.0, 2))
    assert taken == [["f0", "f1"], ["f2", "f3"], ["f4"]]

"""The link model, on a clock that only sleeping advances."""

from ctypes import c_double
from itertools import pairwise

import pytest

from overwinter.device.link import Link, Switch


class Clock:
    def __init__(self):
        self.now = 0.0

    def read(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def link_of(switch=None, **settings):
    clock = Clock()
    return Link(1e6, clock.read, clock.sleep, 0.5, switch, **settings), clock


def test_a_transfer_takes_its_latency_and_the_time_of_its_bytes():
    link, clock = link_of()
    pieces = list(link.transfer(2_500_500))
    assert clock.now == pytest.approx(link.transfer_s(2_500_500)) == pytest.approx(3.0005)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == 2_500_500
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces))


def test_the_time_between_two_sleeps_shortens_the_second():
    link, clock = link_of()
    for _ in link.transfer(1_000_000):
        clock.now += 0.0004
    assert clock.now == pytest.approx(1.5)


def test_a_slow_switch_slows_a_link():
    link, clock = link_of(Switch(5e5))
    list(link.transfer(1_000_000))
    assert clock.now == pytest.approx(link.transfer_s(1_000_000)) == pytest.approx(2.5)


def test_two_links_of_one_switch_get_half_each():
    switch = Switch(1e6)
    one, one_clock = link_of(switch)
    other, other_clock = link_of(switch)
    for _ in zip(one.transfer(1_000_000), other.transfer(1_000_000), strict=True):
        pass
    assert one_clock.now == pytest.approx(2.5, abs=0.01)
    assert other_clock.now == pytest.approx(2.5, abs=0.01)


def test_processes_share_a_switch_through_the_time_when_it_is_free():
    free_at_s = c_double()
    one, one_clock = link_of(Switch(1e6, 2, free_at_s))
    other, other_clock = link_of(Switch(1e6, 2, free_at_s))
    for _ in zip(one.transfer(1_000_000), other.transfer(1_000_000), strict=True):
        pass
    assert one_clock.now == pytest.approx(2.5, abs=0.01)
    assert other_clock.now == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize("written", [1e18, float("inf"), float("nan"), -1e18])
def test_whatever_another_process_writes_a_transfer_ends(written):
    free_at_s = c_double()
    link, clock = link_of(Switch(1e6, 3, free_at_s))
    for _ in link.transfer(1_000_000):
        free_at_s.value = written
    assert 1.49 < clock.now < 4.51


def test_a_switch_that_is_idle_again_does_not_delay_a_transfer():
    switch = Switch(1e6)
    one, _ = link_of(switch)
    other, other_clock = link_of(switch)
    list(one.transfer(1_000_000))
    other_clock.now = 10.0
    list(other.transfer(1_000_000))
    assert other_clock.now == pytest.approx(11.5)

import asyncio
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from overwinter.node.profiling import quiet
from overwinter.node.profiling.quiet import Quiet


class House:
    """A clock that moves only when somebody sleeps, and traffic that a test makes."""

    def __init__(self, share=0.1):
        self.now = 100.0
        self.arrivals = 0
        self.arrived_at = None
        self.busy_until = 0.0
        self.serves = False
        self.quiet = Quiet(self, lambda: self.now < self.busy_until, share, lambda: self.now)

    def arrive(self):
        self.arrivals += 1
        self.arrived_at = self.now

    async def _sleep(self, seconds):
        self.now += seconds
        if self.serves:
            self.arrive()

    def moment(self) -> int:
        module = SimpleNamespace(sleep=self._sleep)
        original, quiet.asyncio = quiet.asyncio, module
        try:
            return asyncio.run(self.quiet.moment())
        finally:
            quiet.asyncio = original


def test_an_idle_node_is_measured_without_a_pause():
    house = House()
    for _ in range(5):
        house.moment()
        house.now += 2.0
        house.quiet.spent(2.0)
    assert house.now == 110.0


@given(st.lists(st.floats(0.001, 3.0), min_size=1, max_size=20), st.sampled_from([0.05, 0.1, 0.5, 1.0]))
def test_a_node_that_serves_gives_no_more_than_the_share(spent, share):
    house = House(share)
    house.serves = True
    house.arrive()
    begun = house.now
    for seconds in spent:
        house.moment()
        house.now += seconds
        house.quiet.spent(seconds)
        house.arrive()
    house.moment()
    assert sum(spent) <= share * (house.now - begun) * 1.001


def test_nothing_is_measured_while_something_is_under_way():
    house = House()
    house.busy_until = 107.0
    house.moment()
    assert house.now >= 107.0


def test_a_measurement_is_disturbed_by_what_came_and_went():
    house = House()
    mark = house.moment()
    assert not house.quiet.disturbed(mark)
    house.arrive()
    assert house.quiet.disturbed(mark)
    mark = house.moment()
    house.busy_until = house.now + 1.0
    assert house.quiet.disturbed(mark)

import asyncio
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from overwinter.profiling import quiet
from overwinter.profiling.quiet import Quiet


class Parts:
    """A clock that moves only during a sleep or by a test, and traffic that a test defines."""

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

    def wait_until_quiet(self) -> int:
        module = SimpleNamespace(sleep=self._sleep)
        original, quiet.asyncio = quiet.asyncio, module
        try:
            return asyncio.run(self.quiet.wait_until_quiet())
        finally:
            quiet.asyncio = original


def test_an_idle_node_is_measured_without_a_pause():
    parts = Parts()
    for _ in range(5):
        parts.wait_until_quiet()
        parts.now += 2.0
        parts.quiet.spent(2.0)
    assert parts.now == 110.0


@given(st.lists(st.floats(0.001, 3.0), min_size=1, max_size=20), st.sampled_from([0.05, 0.1, 0.5, 1.0]))
def test_a_node_that_serves_gives_measurements_no_more_than_their_share_of_the_time(spent, share):
    parts = Parts(share)
    parts.serves = True
    parts.arrive()
    begun = parts.now
    for seconds in spent:
        parts.wait_until_quiet()
        parts.now += seconds
        parts.quiet.spent(seconds)
        parts.arrive()
    parts.wait_until_quiet()
    assert sum(spent) <= share * (parts.now - begun) * 1.001


def test_nothing_is_measured_while_something_is_in_progress():
    parts = Parts()
    parts.busy_until = 107.0
    parts.wait_until_quiet()
    assert parts.now >= 107.0


def test_a_measurement_is_disturbed_by_an_arrival_and_by_a_request_in_progress():
    parts = Parts()
    mark = parts.wait_until_quiet()
    assert not parts.quiet.disturbed(mark)
    parts.arrive()
    assert parts.quiet.disturbed(mark)
    mark = parts.wait_until_quiet()
    parts.busy_until = parts.now + 1.0
    assert parts.quiet.disturbed(mark)

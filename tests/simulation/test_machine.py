"""Cores, queues and blocks of the simulated node."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.simulation.machine import Cores, HostBlocks, Job, SerialResource
from overwinter.simulation.timeline import Timeline
from tests.scheduler.world import spec


class Shop:
    """Some cores, and a record of what was done on them, and when."""

    def __init__(self, count: int) -> None:
        self.timeline = Timeline()
        self.cores = Cores(count, self.timeline)
        self.jobs: dict[Job, None] = {}
        self.done: list[tuple[str, float]] = []

    def submit(self, name: str, cores: int, seconds: float) -> Job:
        job = Job(cores, seconds, self.jobs, lambda: self.done.append((name, self.timeline.now)))
        self.cores.submit(job)
        return job

    def finish(self) -> list[tuple[str, float]]:
        while self.timeline.next_at() < float("inf"):
            self.timeline.step()
        assert self.cores.demand == 0
        return self.done


def test_more_jobs_than_cores_share_them_equally():
    shop = Shop(2)
    for name, cores, seconds in (("a", 1, 3), ("b", 1, 1), ("c", 1, 1)):
        shop.submit(name, cores, seconds)
    assert shop.finish() == [("b", 1.5), ("c", 1.5), ("a", 3.5)]


def test_a_job_that_comes_later_slows_the_others_from_then_on():
    shop = Shop(1)
    shop.submit("first", 1, 2)
    shop.timeline.after(1, lambda: shop.submit("second", 1, 3))
    assert shop.finish() == [("first", 3), ("second", 5)]


def test_a_job_wider_than_the_machine_takes_all_of_it():
    shop = Shop(2)
    shop.submit("wide", 8, 1)
    assert shop.finish() == [("wide", 1)]
    shop.submit("wide", 8, 2)
    shop.submit("narrow", 2, 1)
    assert shop.finish()[1:] == [("narrow", 3), ("wide", 4)]


def test_cancelled_jobs_give_their_cores_back_once():
    shop = Shop(1)
    running, other = shop.submit("running", 1, 5), shop.submit("other", 1, 5)
    shop.submit("last", 1, 1)
    shop.cores.cancel(other)
    shop.timeline.after(1, partial(shop.cores.cancel, running))
    shop.timeline.after(1, partial(shop.cores.cancel, running))
    assert shop.finish() == [("last", 1.5)]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=12),
)
def test_all_work_is_done_and_cores_are_idle_only_without_work(count, jobs):
    """Compare with a computation that steps from one start or end of a job to the next."""
    shop = Shop(count)
    for number, (at, cores, seconds) in enumerate(jobs):
        shop.timeline.at(at, partial(shop.submit, str(number), cores, seconds))
    ended = dict(shop.finish())
    left = {str(number): float(seconds) for number, (_, _, seconds) in enumerate(jobs)}
    now, expected = 0.0, {}
    while left:
        here = {name for name in left if jobs[int(name)][0] <= now}
        demand = sum(min(jobs[int(name)][1], count) for name in here)
        speed = min(1.0, count / demand) if demand else 1.0
        later = [at for at, _, _ in jobs if at > now]
        step = min([left[name] / speed for name in here] + [at - now for at in later])
        now += step
        for name in here:
            left[name] -= step * speed
        for name in [name for name in here if left[name] < 1e-9]:
            del left[name]
            expected[name] = now
    assert ended == pytest.approx(expected)


def test_callbacks_at_the_same_time_run_in_the_order_in_which_they_were_given():
    timeline, seen = Timeline(), []
    for name in "abc":
        timeline.at(1.0, partial(seen.append, name))
    timeline.at(0.5, lambda: timeline.at(0.0, partial(seen.append, "late")))
    while timeline.next_at() <= 1.0:
        timeline.step()
    assert seen == ["late", "a", "b", "c"]
    assert timeline.now == 1.0


def test_a_serial_resource_does_one_thing_after_another_and_nothing_while_it_is_closed():
    disk = SerialResource()
    assert [disk.take(0, 2), disk.take(1, 2), disk.take(10, 1)] == [2, 4, 11]
    disk.close_until(20)
    assert disk.take(12, 1) == 21


def test_a_block_is_held_when_its_load_has_ended_and_counts_once_for_all_functions():
    host = HostBlocks(100)
    mine, theirs = spec(blobs=(("a", 60), ("b", 10))), spec("g", blobs=(("a", 60), ("c", 50)))
    assert host.missing(mine) == {"a": 60, "b": 10}
    host.add(host.missing(mine), mine.store, 5.0)
    assert not host.holds(mine, 4.9)
    assert host.ready_at(theirs, 4.9) == 5.0
    assert host.holds(mine, 5.0)
    assert host.missing(theirs) == {"c": 50}
    assert not host.fits(host.missing(theirs))
    host.drop(["b", "nowhere"], mine.store)
    assert host.nbytes == 60
    assert host.fits({"c": 40})
    assert not host.holds(mine, 9.0)


def test_each_host_store_has_its_own_copy_of_a_block():
    host = HostBlocks(100)
    shared, own = spec(blobs=(("a", 40),)), spec("g", blobs=(("a", 40),), tenant="u", dedicated=True)
    for each in (shared, own):
        host.add(host.missing(each), each.store, 0.0)
    assert host.nbytes == 80
    host.drop(["a"], own.store)
    assert host.holds(shared, 1.0)
    assert not host.holds(own, 1.0)
    assert host.nbytes == 40

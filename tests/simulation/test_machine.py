"""Cores, queues and blocks of the modelled node."""

from functools import partial

from overwinter.simulation.machine import Cores, HostBlocks, Job, Queue
from overwinter.simulation.timeline import Timeline
from tests.policy.world import spec


class Shop:
    """Some cores and what was done on them, when."""

    def __init__(self, count: int) -> None:
        self.timeline = Timeline()
        self.cores = Cores(count, self.timeline)
        self.done: list[tuple[str, float]] = []

    def submit(self, name: str, cores: int, seconds: float) -> Job:
        job = Job(cores, seconds, lambda: self.done.append((name, self.timeline.now)))
        self.cores.submit(job)
        return job

    def finish(self) -> list[tuple[str, float]]:
        while self.timeline.next_at() < float("inf"):
            self.timeline.step()
        assert self.cores.free == self.cores.count
        return self.done


def test_jobs_wait_for_cores_in_turn():
    shop = Shop(2)
    for name, cores, seconds in (("a", 1, 3), ("b", 1, 1), ("wide", 2, 1), ("small", 1, 1)):
        shop.submit(name, cores, seconds)
    assert shop.finish() == [("b", 1), ("a", 3), ("wide", 4), ("small", 5)]


def test_a_job_wider_than_the_machine_takes_all_of_it():
    shop = Shop(2)
    shop.submit("wide", 8, 1)
    shop.submit("next", 1, 1)
    assert shop.finish() == [("wide", 1), ("next", 2)]


def test_cancelled_jobs_give_their_cores_back_once():
    shop = Shop(1)
    running, waiting = shop.submit("running", 1, 5), shop.submit("waiting", 1, 5)
    shop.submit("last", 1, 1)
    shop.cores.cancel(waiting)
    shop.timeline.after(2, partial(shop.cores.cancel, running))
    shop.timeline.after(2, partial(shop.cores.cancel, running))
    assert shop.finish() == [("last", 3)]


def test_things_at_the_same_time_happen_in_the_order_they_were_said():
    timeline, seen = Timeline(), []
    for name in "abc":
        timeline.at(1.0, partial(seen.append, name))
    timeline.at(0.5, lambda: timeline.at(0.0, partial(seen.append, "late")))
    while timeline.next_at() <= 1.0:
        timeline.step()
    assert seen == ["late", "a", "b", "c"]
    assert timeline.now == 1.0


def test_a_queue_does_one_thing_after_another():
    disk = Queue()
    assert [disk.take(0, 2), disk.take(1, 2), disk.take(10, 1)] == [2, 4, 11]
    disk.closed_until(20)
    assert disk.take(12, 1) == 21


def test_blocks_are_there_when_they_have_come_and_count_once():
    host = HostBlocks(100)
    mine, theirs = spec(blobs=(("a", 60), ("b", 10))), spec("g", blobs=(("a", 60), ("c", 50)))
    assert host.missing(mine) == {"a": 60, "b": 10}
    host.add(host.missing(mine), mine.store, 5.0)
    assert not host.holds(mine, 4.9)
    assert host.ready_at(theirs, 4.9) == 5.0
    assert host.holds(mine, 5.0)
    assert host.missing(theirs) == {"c": 50}
    assert not host.has_room(host.missing(theirs))
    host.drop(["b", "nowhere"], mine.store)
    assert host.nbytes == 60
    assert host.has_room({"c": 40})
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

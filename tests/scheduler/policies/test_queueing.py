"""The order in which requests wait, and how much work a long queue makes."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.actions import Refuse
from overwinter.core.events import Alarm, Arrived, Cancelled, RunEnded
from overwinter.core.function import Settings
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.policies.queueing import insert, order_late, put_back, remove_all
from overwinter.scheduler.request import Request
from tests.scheduler.world import World, spec

WAITING = 500
"""The requests of one half of a long queue."""


class Id(int):
    """An id that counts how often one is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


class Requests(dict[int, Request]):
    """A table of requests that counts how often one is read."""

    reads = 0

    def __getitem__(self, id_: int) -> Request:
        self.reads += 1
        return super().__getitem__(id_)


def request(id_: int, level: int = 100, due: float = 0.0) -> Request:
    return Request(id_, "f", "t", due, 99.0, level, due)


def busy(**settings) -> World:
    """Return a world whose only worker runs its first request."""
    world = World()
    world.deploy(spec(timeout_s=1000.0, queue_limit=2 * WAITING + 1, **settings))
    world.arrive()
    world.load_blocks()
    world.ready()
    return world


def fill(world: World, deadline: float | None = None, priority: int = 0) -> list[Id]:
    """Let requests wait; return their ids."""
    state = world.state
    ids = [Id(number) for number in range(len(state.requests) + 1, len(state.requests) + 1 + WAITING)]
    for id_ in ids:
        world.scheduler.handle(Arrived(id_, "f", None, deadline, priority, None, None), world.now)
    return ids


def refused(actions: list) -> list[int]:
    return [action.request for action in actions if isinstance(action, Refuse)]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 10)), max_size=12),
    st.integers(0, 10),
    st.booleans(),
)
def test_late_requests_of_the_first_level_are_put_last_or_first_and_nothing_else_moves(made, before, late_first):
    made = sorted(made)
    requests = {id_: request(id_, level, due) for id_, (level, due) in enumerate(made)}
    queue = deque(requests)
    order_late(queue, requests, before, late_first)
    assert [requests[id_].level for id_ in queue] == [level for level, _ in made]
    assert sorted(queue) == sorted(requests)
    first = [id_ for id_ in queue if requests[id_].level == made[0][0]]
    lateness = [requests[id_].due < before for id_ in first]
    assert lateness == sorted(lateness, reverse=late_first)
    for late in (True, False):
        same = [id_ for id_ in first if (requests[id_].due < before) == late]
        assert same == sorted(same)
    assert list(queue)[len(first) :] == sorted(requests)[len(first) :]


@given(st.lists(st.integers(1, 4), max_size=12), st.lists(st.integers(1, 4), max_size=4))
def test_requests_wait_by_level_then_in_their_order_and_return_to_the_front_of_their_level(levels, returned):
    requests = {id_: request(id_, level) for id_, level in enumerate(levels + returned)}
    arrived, back = list(requests)[: len(levels)], list(requests)[len(levels) :]
    queue: deque[int] = deque()
    for id_ in arrived:
        insert(queue, requests[id_], requests)
    assert list(queue) == sorted(arrived, key=lambda id_: requests[id_].level)
    put_back(queue, tuple(back), requests)
    assert list(queue) == sorted(back + arrived, key=lambda id_: requests[id_].level)


@given(st.lists(st.integers(), unique=True), st.lists(st.integers()))
def test_several_requests_leave_and_the_others_keep_their_order(waiting, leaving):
    queue = deque(waiting)
    remove_all(queue, leaving)
    assert list(queue) == [id_ for id_ in waiting if id_ not in leaving]


def test_a_request_finds_its_place_in_a_long_queue_with_few_comparisons():
    requests = Requests({id_: request(id_, level=1 + id_ // WAITING) for id_ in range(2 * WAITING)})
    queue = deque(range(2 * WAITING))
    requests |= {-1: request(-1, level=1), -2: request(-2, level=2)}
    insert(queue, requests[-1], requests)
    put_back(queue, (-2,), requests)
    assert [queue.index(id_) for id_ in (-1, -2)] == [WAITING, WAITING + 1]
    assert requests.reads < 40


def test_all_expired_requests_leave_a_long_queue_in_one_pass():
    world = busy()
    fill(world)
    expiring = fill(world, deadline=5.0)
    Id.compared = 0
    actions = world.scheduler.handle(Alarm(), 5.0)
    assert refused(actions) == expiring
    assert Id.compared <= 2 * WAITING


def test_all_requests_that_are_refused_as_late_leave_a_long_queue_in_one_pass():
    profile = Profile(weight_bytes=30, macs=1, points=(Point(1, 1, 1, 1, 0.3),))
    world = busy(profile=profile, slo_ms=1000, late="refuse")
    first, last = world.arrive(priority=1), fill(world, priority=200)
    world.now = 0.95
    fill(world)
    run, Id.compared = next(iter(world.running.values())), 0
    actions = world.scheduler.handle(RunEnded(run.worker, run.run, (), program_s=0.3), 0.95)
    assert refused(actions) == [first, *last]
    assert Id.compared <= 2 * WAITING


def test_a_cancelled_request_is_searched_for_once_in_a_queue_whose_length_is_bounded():
    with pytest.raises(ValueError, match="queue_limit must be from 1 to 4,096 requests, got 4097"):
        Settings(queue_limit=4097)
    world = busy()
    last = fill(world)[-1]
    Id.compared = 0
    world.scheduler.handle(Cancelled(Id(last)), 0.0)
    assert Id.compared <= WAITING + 10
    assert last not in world.state.functions["f@1"].queue

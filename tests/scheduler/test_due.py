"""Thousands of requests may expire together: a step refuses some of them, and the next step follows immediately."""

import pytest

from overwinter.core.actions import Refuse
from overwinter.core.events import Alarm
from overwinter.scheduler import cycle
from tests.scheduler.test_devices import device, pooled
from tests.scheduler.world import World, spec

NUMBER = 6
MOST = 3


@pytest.fixture(autouse=True)
def few_actions(monkeypatch):
    monkeypatch.setattr(cycle, "ACTIONS_MAX", MOST)


def refused(actions) -> list[int]:
    return [each.request for each in actions if isinstance(each, Refuse)]


def refused_now(world) -> list[list[int]]:
    """Handle the alarms that are due now; return the requests that each of these steps refused."""
    steps = []
    while world.alarm is not None and world.alarm <= world.now:
        world.alarm = None
        steps.append(refused(world.send(Alarm())))
    return steps


def test_requests_that_expire_together_are_refused_in_several_steps():
    world = World()
    for number in range(NUMBER):
        world.deploy(spec(f"f{number}", timeout_s=5.0))
    requests = [world.arrive(f"f{number}") for number in range(NUMBER) for _ in range(2)]
    world.now += 5.0
    steps = refused_now(world)
    assert [id_ for step in steps for id_ in step] == requests
    assert all(len(step) <= MOST + 1 for step in steps)


def test_expired_requests_for_which_a_device_is_chosen_are_refused_in_several_steps():
    world = World(devices=(device(),))
    for number in range(NUMBER):
        world.deploy(pooled(f"f{number}", timeout_s=50.0))
    first = world.arrive("f0")
    world.settle_processes()
    requests = [world.arrive(f"f{number}", deadline=5.0) for number in range(NUMBER)]
    world.settle_processes()
    world.now = 6.0
    steps = [refused(world.finish_on_device()), *refused_now(world)]
    assert first in world.answers
    assert sorted(id_ for step in steps for id_ in step) == requests
    assert all(len(step) <= MOST + 1 for step in steps)

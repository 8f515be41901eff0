"""A new resource needs a name and a claim in `Resources`: then it bounds workers, and all that wait get some of it."""

from random import Random

import pytest

from overwinter.core.actions import Reply, StartWorker, StopWorker
from overwinter.core.policies import POLICIES
from overwinter.scheduler import resources
from overwinter.scheduler.ledger import Resource
from tests.scheduler import replayed
from tests.scheduler.world import World, spec

LICENCES = 2
STEPS = 150
"""The number of random steps."""
SOON_S = 50.0


class Licensed(resources.Resources):
    """Each worker takes one of a few licences."""

    def __init__(self, config, policy) -> None:
        super().__init__(config, policy)
        self.licences = Resource("licences", LICENCES)

    def of_worker(self, point, nbytes):
        return {**super().of_worker(point, nbytes), self.licences: 1}


def test_a_new_resource_bounds_workers_and_is_waited_for(monkeypatch):
    monkeypatch.setattr("overwinter.scheduler.cycle.Resources", Licensed)
    world = World(cores=8)
    for name in "abcd":
        world.deploy(spec(name, keep_alive_s=1000.0, timeout_s=1000.0))
        world.arrive(name)
    while world.loads:
        world.load_blocks()
    assert world.resources.licences.taken == LICENCES
    assert sum(isinstance(action, StartWorker) for action in world.log) == LICENCES
    world.settle()
    assert [type(answer) for answer in world.answers.values()] == [Reply] * 4
    assert sum(isinstance(action, StopWorker) for action in world.log) == 2
    assert world.resources.licences.taken == LICENCES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_more_of_a_new_resource_is_taken_than_there_is_and_all_get_it(policy, monkeypatch):
    monkeypatch.setattr("overwinter.scheduler.cycle.Resources", Licensed)
    world, chance, most = World(policy=policy, **replayed.BOUNDS["cores"]), Random(policy), 0
    for number in range(STEPS):
        replayed.step(world, chance, number)
        most = max(most, world.resources.licences.taken)
    world.end_well(replayed.NAMES, SOON_S)
    assert most == LICENCES
    assert world.resources.licences.taken == 0

"""A resource that nobody thought of is named, claimed and given back in three files, and all else follows."""

from overwinter.core.actions import Reply, StartBody, StopBody
from overwinter.scheduler import resources
from overwinter.scheduler.ledger import Resource
from tests.scheduler.world import World, spec

LICENCES = 2


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
    while world.staging:
        world.stage()
    assert world.resources.licences.taken == LICENCES
    assert sum(isinstance(action, StartBody) for action in world.log) == LICENCES
    world.settle()
    assert [type(answer) for answer in world.answers.values()] == [Reply] * 4
    assert sum(isinstance(action, StopBody) for action in world.log) == 2
    assert world.resources.licences.taken == LICENCES

"""When waiting requests of a function need one more worker."""

import pytest

from overwinter.core.profile import Point, Profile
from overwinter.scheduler.blocks import missing_bytes
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.operations import begin_start, end_start
from overwinter.scheduler.wants import needs_worker
from tests.scheduler.world import World, spec

FAST = Point(2, 4, 1, 1, 0.1)
SLOW = Point(1, 4, 1, 1, 0.4)


@pytest.mark.parametrize(("waiting", "needs"), [(4, False), (5, True)])
@pytest.mark.parametrize("points", [(FAST, SLOW), (SLOW, FAST)])
def test_one_more_worker_is_needed_if_workers_of_several_speeds_are_too_slow_together(points, waiting, needs):
    """Together they serve 12.5 requests a second. Two requests run, so the last of five others ends after 0.56 s."""
    world = World(cores=8)
    profile = Profile(weight_bytes=30, macs=1, points=(FAST, SLOW))
    world.deploy(spec(profile=profile, slo_ms=500, max_workers=3, threads=2))
    cycle, function = world.scheduler.cycle, world.state.functions["f@1"]
    for point in points:
        begin_start(cycle, function, point)
    for worker in function.workers.values():
        end_start(cycle, worker)
        worker.runs[worker.id] = Operation(function, 0.0, 1.0, 1.0, 1.0)
    function.queue.extend(range(waiting))
    assert needs_worker(cycle, function) is needs


def test_asking_for_missing_bytes_changes_nothing():
    world = World()
    world.deploy(spec())
    function, stores = world.state.functions["f@1"], dict(world.state.stores)
    assert missing_bytes(world.scheduler.cycle, function) == 30
    assert world.state.stores == stores == {}

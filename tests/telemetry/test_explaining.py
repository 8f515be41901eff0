"""An explanation describes the part of a function that is measured."""

from collections import Counter

import pytest

from overwinter.core.config import SchedulerConfig
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.published import Published
from overwinter.store.host import VerificationCounts
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.explaining import ProfileFacts, Times, explanation
from overwinter.telemetry.sources import Sources
from tests.scheduler.test_devices import device
from tests.scheduler.world import spec
from tests.telemetry.test_pool import Watched

MEASURED = Profile(weight_bytes=30, macs=7, points=(Point(1, 9, 1, 1, 0.1),), wake_s=0.02)


def profile_of(world: Watched, id_: str) -> ProfileFacts | None:
    sources = Sources(SchedulerConfig(), world.statistics, Accounts(), VerificationCounts(), Counter())
    known = Published(world.scheduler.cycle).detail(id_, world.now)
    return explanation(sources, known, {}, Times(world.now, 0.0)).profile


@pytest.mark.parametrize("place", ["cpu", "pool", "any"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_profile_of_a_program_that_is_cut_is_unknown_if_only_its_slices_run(place, cut):
    world = Watched(devices=(device(), device(1)))
    world.deploy(spec("f", device=place, profile=MEASURED), cut=cut and place != "cpu")
    found = profile_of(world, "f@1")
    if cut and place == "pool":
        assert found is None
    else:
        assert (found.points, found.macs) == (MEASURED.points, 7)


def test_the_profile_of_a_function_whose_program_runs_on_the_pool_is_that_of_the_program():
    world = Watched(devices=(device(),))
    world.deploy(spec("f:program", device="pool", profile=MEASURED))
    world.deploy(spec("f", device="pool", has_handler=True))
    found = profile_of(world, "f@1")
    assert (found.points, found.macs, found.age_s) == (MEASURED.points, 7, 0.0)

"""How many copies fit: the answer fits, and one more does not."""

import pytest

from overwinter.core.errors import CallerError
from overwinter.simulation.capacity import capacity
from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

BUSY = function(rate=3.0, settings={"slo_ms": 200, "max_batch": 1})


def test_the_number_of_copies_found_fits_and_one_more_does_not():
    scenario = scene(BUSY, node={"cores": 2}, duration_s=20)
    tries = []
    found = capacity(scenario, 0.9, observe=tries.append)
    assert found.copies > 1
    assert found.functions == found.copies
    assert tuple(tries) == found.attempts
    assert World(scenario.multiplied(found.copies)).run().total.attainment >= 0.9
    assert World(scenario.multiplied(found.copies + 1)).run().total.attainment < 0.9
    assert found.report.total.attainment >= 0.9


def test_where_not_even_one_copy_fits_the_capacity_is_0():
    found = capacity(scene(function(settings={"slo_ms": 1}), duration_s=5), 0.5)
    assert (found.copies, found.functions, found.report) == (0, 0, None)


def test_a_scenario_without_an_slo_is_refused():
    with pytest.raises(CallerError, match="slo_ms"):
        capacity(scene(function(settings={})), 0.9)


def test_a_scenario_without_requests_is_refused():
    with pytest.raises(CallerError, match="no request"):
        capacity(scene(function(rate=0.001), duration_s=0.01), 0.9)

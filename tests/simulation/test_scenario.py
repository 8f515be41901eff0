"""Scenarios are parsed strictly, siblings share the declared parts, and errors name the key."""

from pathlib import Path

import pytest

from overwinter.core.errors import CallerError
from overwinter.simulation.models import MIB
from overwinter.simulation.scenario import read_scenario
from tests.simulation.scenes import function, scene

SCENARIOS = sorted((Path(__file__).parent.parent.parent / "scenarios").glob("*.toml"))
GOOD = """
duration_s = 10
[[functions]]
name = "f"
blocks = [{ mib = 1 }]
latency_ms = { 1 = 5 }
workload = { kind = "poisson", rate = 1 }
"""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_outside_of_tetris_can_be_read(path):
    assert read_scenario(path).simulated_functions()


def test_siblings_share_blocks_and_programs():
    first, second, other = scene(function("a", variants=2), function("b")).simulated_functions()
    assert [each.spec.id for each in (first, second, other)] == ["a-0000@1", "a-0001@1", "b@1"]
    blocks = [{blob.address for blob in each.spec.blobs} for each in (first, second, other)]
    assert len(blocks[0] & blocks[1]) == len(blocks[0] & blocks[2]) == 3
    assert len(blocks[0] - blocks[1]) == 1
    assert first.spec.program == second.spec.program != other.spec.program
    assert {blob.nbytes for blob in first.spec.blobs} == {10 * MIB, MIB}
    assert all(len(address) == 64 for address in blocks[0])


def test_copies_multiply_the_siblings():
    assert len(scene(function(variants=3), function("g")).multiplied(4).simulated_functions()) == 16


def test_latency_is_interpolated_between_the_batches_given():
    [model] = scene(function(latency_ms={"2": 50, "4": 110})).functions
    known = model.scheduler_profile()
    assert [known.latency_s(1, batch, 1) for batch in (1, 2, 3, 4, 6)] == pytest.approx([0.05, 0.05, 0.08, 0.11, 0.17])
    [alone] = scene(function(latency_ms={"1": 50})).functions
    assert alone.scheduler_profile().latency_s(1, 4, 1) == pytest.approx(0.2)


def test_more_cores_shorten_all_but_the_serial_part():
    changes = {"serial": 0.2, "latency_ms": {"1": 100, "4": 400}, "settings": {"threads": 4, "max_batch": 2}}
    [model] = scene(function(**changes)).functions
    known = model.scheduler_profile()
    assert [(point.cores, point.batch) for point in known.points] == [(c, b) for c in (1, 2, 3, 4) for b in (1, 2)]
    assert known.latency_s(1, 2, 1) == pytest.approx(0.2)
    assert known.latency_s(4, 2, 1) == pytest.approx(0.2 * (0.2 + 0.8 / 4))


def test_the_slos_of_asyfunc_are_the_latencies_of_the_largest_workers():
    [path] = [path for path in SCENARIOS if path.stem == "asyfunc"]
    for model in read_scenario(path).functions:
        largest = model.scheduler_profile().latency_s(16, 8, 1)
        assert largest is not None
        assert 1000 * largest <= model.settings.slo_ms == pytest.approx(1000 * largest, abs=0.11)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (GOOD.replace("duration_s = 10", ""), "duration_s"),
        (GOOD.replace("rate = 1", "rat = 1"), "rat"),
        (GOOD.replace("1 = 5", "one = 5"), r"latency_ms"),
        (GOOD.replace("1 = 5", "0 = 5"), r"latency_ms"),
        (GOOD.replace("mib = 1", "mib = 0"), r"mib must be above 0.*functions\[0\]\.blocks\[0\]"),
        (GOOD.replace("mib = 1", "mib = 1e308"), r"mib must be above 0 and at most 1e\+12.*blocks\[0\]"),
        (GOOD + 'settings = { device = "any" }\ndevice_ms = { 0 = 5 }\n', "device_ms needs .* batch sizes of 1"),
        (GOOD + "gmacs = 1e300\n", "gmacs must be above 0 and at most"),
        (GOOD + "[node]\nhost_mib = 1e305\n", "host_mib must be above 0 and at most"),
        (GOOD.replace("latency_ms = { 1 = 5 }", "profile = [[1, 1, 1, 5, inf]]"), "a worker must have at most"),
        (GOOD.replace("poisson", "poison"), r"functions\[0\]\.workload"),
        (GOOD + 'colour = "red"\n', "colour"),
        (GOOD + "serial = 1.5\n", "serial must be"),
        (GOOD + "[node]\ncores = 0\n", r"cores must be above 0.*node"),
        (GOOD + "[node]\ngpus = 1\n", "gpus"),
        (GOOD + "[faults]\nrun_crash_share = -1\n", "run_crash_share"),
        (GOOD + GOOD.split("10")[1], "names must be unique.*: f"),
        (GOOD + "variants = 2\n" + GOOD.split("10")[1], "names must be unique.*: f"),
        (GOOD + "variants = 2\n" + GOOD.split("10")[1].replace('"f"', '"f-0001"'), "names must be unique"),
        (GOOD.replace("latency_ms = { 1 = 5 }", "profile = [[2, 1, 1, 30, 20]]"), "no latency of function 'f'"),
        (GOOD + '[[devices]]\nname = "d"\nmemory_bytes = 1048576\npeers = { "e" = 1e9 }\n', "'d' has a link from 'e'"),
        (GOOD.replace('"f"', '"f@1"'), "without @"),
        (GOOD + "settings = { slo = 5 }\n", r"`slo`.*settings"),
        ("duration_s = ", "not valid TOML"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path, wrong, said):
    path = tmp_path / "wrong.toml"
    path.write_text(wrong)
    with pytest.raises(CallerError, match=said) as raised:
        read_scenario(path)
    assert "wrong.toml" in str(raised.value)


@pytest.mark.parametrize(
    ("node", "scheduler", "host_bytes"),
    [
        ({}, {}, None),
        ({"host_mib": 2}, {}, 2 * MIB),
        ({"host_mib": 2}, {"host_bytes": MIB}, MIB),
        ({"host_mib": 2}, {"host_bytes": 0}, 0),
    ],
)
def test_the_scheduler_may_have_less_room_for_blocks_than_the_machine(node, scheduler, host_bytes):
    assert scene(node=node, scheduler=scheduler).scheduler_config().host_bytes == host_bytes


def test_a_start_may_take_no_time():
    [model] = scene(function(start_s=0, prepare_s=0, bind_s=0)).functions
    assert model.scheduler_profile().wake_s == pytest.approx(0, abs=1e-6)


def test_the_scenario_from_which_the_wrong_ones_are_made_is_valid(tmp_path):
    (tmp_path / "good.toml").write_text(GOOD)
    assert read_scenario(tmp_path / "good.toml").duration_s == 10

"""The scheduler and the simulated devices of a pool agree on what lies where, and no request is lost."""

import io

import pytest

from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

SMALL = [
    {"name": name, "memory_bytes": 40 << 20, "bytes_per_s": 2e9, "switch": "s", "peers": {peer: 8e9}}
    for name, peer in (("a", "b"), ("b", "a"))
]
FAULTS = {
    "run_crash_share": 0.02,
    "start_crash_share": 0.1,
    "unplaced_share": 0.2,
    "executor_life_s": 20.0,
    "zygote_life_s": 60.0,
}


def pool(faults=None, policy="overwinter", **changes):
    """Return a scenario of five functions, of which the two devices together hold two to four."""
    on_device = {"settings": {"device": "pool", "slo_ms": 200, "timeout_s": 20}, "latency_ms": {"1": 10}, "rate": 5.0}
    models = [
        function("siblings", variants=3, **on_device),
        function("alone", variants=2, blocks=[{"mib": 35}], **on_device),
    ]
    return scene(*models, devices=SMALL, faults=faults or {}, scheduler={"policy": policy}, **changes)


def recorded(scenario):
    """Run a scenario, and return its report and its journal."""
    file = io.BytesIO()
    return World(scenario, journal=file, checked=True).run(), file.getvalue()


@pytest.mark.parametrize("binding", ["missing-bytes", "torpor", "random", "native", "infless"])
@pytest.mark.parametrize("faults", [None, FAULTS], ids=["sound", "faults"])
def test_no_request_is_lost(binding, faults):
    report = World(pool(faults, {"device_binding": binding}, seed=3), checked=True).run()
    total = report.total
    assert total.requests > 1000
    assert total.lost == 0
    assert total.answered + sum(total.refused.values()) == total.requests
    if faults is None and binding in ("missing-bytes", "torpor"):
        assert total.answered == total.requests


def test_equal_scenarios_give_equal_journals():
    _, steps = recorded(pool(FAULTS, duration_s=25.0))
    assert steps == recorded(pool(FAULTS, duration_s=25.0))[1]
    assert steps != recorded(pool(FAULTS, duration_s=25.0, seed=2))[1]


def test_the_blocks_that_siblings_share_are_copied_to_a_device_once():
    siblings = function("f", variants=4, settings={"device": "pool"}, latency_ms={"1": 10}, rate=5.0)
    world = World(scene(siblings, devices=[{"name": "a", "memory_bytes": 64 << 20}]))
    assert world.run().total.answered > 500
    assert world.executors.moved_bytes == (30 + 4 * 1) << 20


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["sound", "faults"])
def test_siblings_that_share_runs_need_devices_for_less_time(faults):
    def run(policy):
        settings = {"device": "pool", "max_batch": 8, "timeout_s": 30}
        siblings = function("f", variants=6, settings=settings, latency_ms={"1": 10, "8": 20}, rate=30.0)
        return recorded(
            scene(siblings, devices=SMALL, scheduler={"policy": policy}, faults=faults or {}, duration_s=20.0)
        )

    shared, steps = run({})
    separate, _ = run({"joins": False})
    assert b'"functions":["f-' in steps
    assert shared.total.lost == separate.total.lost == 0
    if faults is None:
        assert shared.total.device_seconds < 0.95 * separate.total.device_seconds
    busy_s = sum(each.busy_share for each in shared.devices.values()) * shared.duration_s
    assert shared.total.device_seconds == pytest.approx(busy_s)


def either(rate, faults=None, devices=SMALL, **changes):
    """Return a scenario of functions that run in workers or on devices, which are faster."""
    settings = {"device": "any", "timeout_s": 20}
    model = function("f", variants=3, settings=settings, latency_ms={"1": 40}, device_ms={"1": 10}, rate=rate)
    return scene(model, devices=devices, faults=faults or {}, node={"cores": 2}, duration_s=20.0, **changes)


def runs_of(scenario):
    """Run a scenario, and return its report and the number of its runs in workers and on devices."""
    report, steps = recorded(scenario)
    return report, steps.count(b'"Run"'), steps.count(b'"RunOnDevice"')


def test_functions_with_device_any_run_where_a_request_is_answered_sooner():
    report, in_workers, on_devices = runs_of(either(1.0))
    assert report.total.lost == 0
    assert report.total.answered == report.total.requests > 40
    assert in_workers < 0.1 * on_devices
    assert set(report.functions) == {f"f-{number:04}" for number in range(3)}
    busy, in_workers, on_devices = runs_of(either(75.0))
    assert busy.total.answered == busy.total.requests > 3000
    assert in_workers > 0.1 * on_devices


@pytest.mark.parametrize(
    ("in_workers_ms", "on_device_ms", "rate"),
    [
        pytest.param(40, 10, 25.0, marks=pytest.mark.slow),
        pytest.param(20, 20, 25.0, marks=pytest.mark.slow),
        (10, 40, 10.0),
    ],
)
def test_with_device_any_functions_meet_their_slo_as_often_as_with_the_better_of_cpu_and_pool(
    in_workers_ms, on_device_ms, rate
):
    def attainment(device):
        settings = {"device": device, "slo_ms": 200, "timeout_s": 20, "max_workers": 4}
        latency_ms = {"1": on_device_ms if device == "pool" else in_workers_ms}
        own = {"device_ms": {"1": on_device_ms}} if device == "any" else {}
        blocks = [{"mib": 20}]
        model = function("f", variants=6, settings=settings, rate=rate, blocks=blocks, latency_ms=latency_ms, **own)
        return World(scene(model, devices=SMALL, node={"cores": 2}, duration_s=30.0)).run().total.attainment

    # At first each device starts its executor, and some requests miss their SLO meanwhile.
    assert attainment("any") >= max(attainment("cpu"), attainment("pool")) - 0.01


def test_functions_with_device_any_run_in_workers_if_there_are_no_devices():
    report, in_workers, on_devices = runs_of(either(1.0, devices=()))
    assert report.total.answered == report.total.requests == in_workers
    assert not on_devices


def test_no_request_for_a_function_with_device_any_is_lost_to_faults():
    report, steps = recorded(either(30.0, FAULTS))
    assert report.total.lost == 0
    assert report.total.answered > 0.9 * report.total.requests
    assert steps == recorded(either(30.0, FAULTS))[1]


def test_devices_that_are_missing_named_twice_or_given_to_the_scheduler_are_refused():
    with pytest.raises(ValueError, match="no devices"):
        scene(function(settings={"device": "pool"}))
    with pytest.raises(ValueError, match="two devices are called 'a'"):
        scene(devices=[SMALL[0], SMALL[0]])
    with pytest.raises(ValueError, match="devices of the scenario"):
        scene(scheduler={"devices": SMALL})


def test_the_report_has_the_figures_of_each_device():
    world = World(pool(FAULTS))
    report = world.run()
    devices, functions = report.devices, report.functions.values()
    assert devices.keys() == {"a", "b"}
    assert all(0 < each.busy_share < 1 and 0 < each.hit_ratio < 1 for each in devices.values())
    assert all(each.executors >= each.crashes > 0 for each in devices.values())
    assert sum(each.unplaced for each in devices.values()) > 0
    busy_s = sum(each.busy_share for each in devices.values()) * report.duration_s
    assert busy_s == pytest.approx(report.total.device_seconds)
    assert report.total.device_seconds == pytest.approx(sum(each.device_seconds for each in functions))
    moved = {report.total.moved_bytes, sum(each.moved_bytes for each in functions)}
    assert moved == {sum(each.moved_bytes for each in devices.values())}
    assert 0 < report.total.idle_device_seconds <= len(functions) * report.duration_s

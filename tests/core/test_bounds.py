"""Every number that a user may set has a minimum and a maximum; the error names both, and the reason."""

import re
from math import inf, nan
from types import UnionType
from typing import get_args

import msgspec
import pytest

from overwinter.core.bounds import brought_within
from overwinter.core.config import (
    NODE_BOUNDS,
    REQUEST_BOUNDS,
    SCHEDULER_BOUNDS,
    NodeConfig,
    RequestLimits,
    SchedulerConfig,
)
from overwinter.core.devices import DEVICE_BOUNDS, DeviceConfig
from overwinter.core.errors import CallerError
from overwinter.core.function import SETTINGS_BOUNDS, TIME_BOUNDS, Settings
from overwinter.core.pipeline import parse_pipeline
from overwinter.core.policies import POLICY_BOUNDS, Policy
from overwinter.core.profile import LayerPoint, Point, Profile

PIPELINE = """
name = "p"
inputs = ["x"]
{}
[stages.a]
function = "f"
inputs = {{ x = "input:x" }}
[outputs]
y = "a:y"
"""


@pytest.mark.parametrize("name", sorted(SETTINGS_BOUNDS))
@pytest.mark.parametrize("wrong", [5e-324, -1, -inf, inf, nan, True, "1", 10**40])
def test_a_setting_outside_its_bounds_is_refused_by_name(name, wrong):
    if name == "keep_alive_s" and wrong == 5e-324:
        pytest.skip("its minimum is 0")
    with pytest.raises(ValueError, match=name):
        Settings(**{name: wrong})


@pytest.mark.parametrize(("name", "bound"), SETTINGS_BOUNDS.items())
def test_the_ends_of_a_bound_are_allowed_and_the_error_for_what_lies_beyond_names_them_and_the_reason(name, bound):
    for end in (bound.least, bound.most):
        value = int(end) if bound.whole else float(end)
        assert getattr(Settings(**{name: value}), name) == value
    allowed = f"{name} must be from {bound.least:,} to {bound.most:,} {bound.unit}"
    for beyond in (bound.least - 1, int(bound.most) + 1):
        with pytest.raises(ValueError, match=re.escape(f"{allowed}, got {beyond}: {bound.why}")):
            Settings(**{name: beyond})


@pytest.mark.parametrize("name", [name for name, bound in SETTINGS_BOUNDS.items() if bound.whole])
def test_a_float_is_no_count(name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        Settings(**{name: 2.0})


@pytest.mark.parametrize("name", sorted(TIME_BOUNDS))
@pytest.mark.parametrize("wrong", ["5e-324", "nan", "inf", "true", "0"])
def test_the_times_of_a_pipeline_have_the_same_bounds_as_those_of_a_function(name, wrong):
    with pytest.raises(CallerError, match=name):
        parse_pipeline(PIPELINE.format(f"{name} = {wrong}"))
    parse_pipeline(PIPELINE.format(f"{name} = 100"))


def test_stored_values_out_of_bounds_are_limited_and_reported():
    kept = {"slo_ms": 5e-324, "memory_mib": 1 << 24, "concurrency": 64, "timeout_s": 5.0, "late": "serve"}
    within, results = brought_within(kept, SETTINGS_BOUNDS)
    assert within == {"slo_ms": 0.1, "memory_mib": 1 << 20, "concurrency": 32, "timeout_s": 5.0, "late": "serve"}
    assert [line.split()[0] for line in results] == ["slo_ms", "concurrency", "memory_mib"]
    msgspec.convert(within, Settings)


CONFIGURED = [
    (SchedulerConfig, SCHEDULER_BOUNDS),
    (NodeConfig, NODE_BOUNDS),
    (RequestLimits, REQUEST_BOUNDS),
    (Policy, POLICY_BOUNDS),
    (DeviceConfig, DEVICE_BOUNDS),
    (Settings, SETTINGS_BOUNDS),
]
REQUIRED = {NodeConfig: {"data": "d"}, DeviceConfig: {"name": "virtual:0", "memory_bytes": 1 << 20}}
"""The values of fields without a default."""


def measured(point: Point, **changes) -> Profile:
    return Profile(**({"weight_bytes": 1, "macs": 1, "points": (point,), "wake_s": 0.1} | changes))


GOOD = Point(1, 10, 1, 1, 0.1)
LAYER = LayerPoint(path="a", macs=1, weight_bytes=1, output_bytes=1, latency_s={1: 0.1})


@pytest.mark.parametrize(
    "wrong",
    [
        measured(Point(1, 10, 1, 1, 5e-324)),
        measured(Point(1, 10, 1, 1, 0.0)),
        measured(Point(1, 10, 1, 1, nan)),
        measured(Point(1, 10, 1, 1, inf)),
        measured(Point(1, -1, 1, 1, 0.1)),
        measured(Point(0, 10, 1, 1, 0.1)),
        measured(Point(1, 10, 1 << 40, 1, 0.1)),
        measured(Point(1, 10, 1, 0, 0.1)),
        measured(GOOD, points=(GOOD, Point(1, 10, 1, 1, 0.2))),
        measured(GOOD, wake_s=nan),
        measured(GOOD, wake_s=-1.0),
        measured(GOOD, weight_bytes=-1),
        measured(GOOD, macs=1 << 80),
        *(measured(GOOD, layers=(msgspec.structs.replace(LAYER, **{field: value}),)) for field, value in [
            ("latency_s", {1: nan}), ("latency_s", {0: 0.1}), ("macs", -1), ("weight_bytes", -1), ("output_bytes", -1),
        ]),
    ],
)  # fmt: skip
def test_an_impossible_profile_has_a_fault(wrong):
    assert measured(GOOD, layers=(LAYER,)).fault() is None
    assert wrong.fault() is not None


@pytest.mark.parametrize(("kind", "bounds"), CONFIGURED)
def test_every_number_that_can_be_set_has_a_minimum_and_a_maximum(kind, bounds):
    numbers = {each.name for each in msgspec.structs.fields(kind) if _is_number(each.type)}
    assert numbers == set(bounds)
    for name, bound in bounds.items():
        for wrong in (nan, inf, -inf, bound.least - 1, bound.most + 1, True):
            with pytest.raises(ValueError, match=name):
                kind(**(REQUIRED.get(kind, {}) | {name: wrong}))


def _is_number(kind: object) -> bool:
    return bool({int, float} & {kind, *(get_args(kind) if isinstance(kind, UnionType) else ())})

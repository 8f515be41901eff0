"""Numbers at the limits of what is allowed: no policy fails, nothing hangs, and no request is forgotten."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from overwinter.core.actions import Explanation
from overwinter.core.bounds import Bound
from overwinter.core.events import Profiled, RateForecast
from overwinter.core.function import SETTINGS_BOUNDS
from overwinter.core.policies import POLICIES, POLICY_BOUNDS, Policy, policy_named
from overwinter.core.profile import LATENCY_BOUND, POINT_BOUNDS, Point, Profile
from tests.scheduler.test_properties import AnyOrder
from tests.scheduler.world import spec

NAMES = ("x", "y")


def at_an_end(bound: Bound) -> st.SearchStrategy:
    kind = int if bound.whole else float
    ends = [bound.least, bound.most, min(1, bound.most), (bound.least + bound.most) / 2]
    return st.sampled_from(sorted({kind(max(bound.least, end)) for end in ends}))


POINTS = st.builds(Point, *map(at_an_end, POINT_BOUNDS.values()))
PROFILES = st.builds(
    Profile,
    weight_bytes=st.sampled_from([0, 1, 1 << 53]),
    macs=st.sampled_from([0, 1, 1 << 62]),
    points=st.lists(POINTS, max_size=6, unique_by=lambda point: point.configuration).map(tuple),
    wake_s=st.none() | at_an_end(LATENCY_BOUND),
)
SETTINGS = st.fixed_dictionaries(
    {"late": st.sampled_from(["serve", "refuse"])},
    optional={name: at_an_end(bound) for name, bound in SETTINGS_BOUNDS.items()},
)


class Extremes(AnyOrder):
    """As `AnyOrder`, with functions of extreme numbers among the others."""

    @rule(name=st.sampled_from(NAMES), chosen=SETTINGS, profile=st.none() | PROFILES, has_handler=st.booleans())
    def deploy_extreme(self, name, chosen, profile, has_handler):
        version = self.versions.setdefault(name, 0) + 1
        self.versions[name] = version
        assert profile is None or profile.fault() is None
        self.world.deploy(spec(name, version, ((f"{name}{version}", 7),), has_handler, profile, name, **chosen))

    @rule(
        name=st.sampled_from(NAMES),
        wait=st.sampled_from([None, 1e-6, 86_400.0]),
        priority=st.sampled_from([0, 1, 1 << 62]),
    )
    def arrive_extreme(self, name, wait, priority):
        self.world.arrive(name, deadline=None if wait is None else self.world.now + wait, priority=priority)

    @rule(name=st.sampled_from(NAMES), profile=PROFILES, rate=st.sampled_from([0.0, 5e-324, 1e300, float("inf")]))
    def learn_extreme(self, name, profile, rate):
        function = f"{name}@{max(1, self.versions.get(name, 0))}"
        self.world.send(Profiled(function, profile))
        self.world.send(RateForecast(function, rate))

    def teardown(self):
        world = getattr(self, "world", None)
        if world is None:
            return
        faults = [each.why for each in world.log if isinstance(each, Explanation) and each.what == "quarantine"]
        assert not faults, faults
        for function in list(world.deployed):
            world.send(RateForecast(function, 0.0))
        self.ring(world)
        # Some timers fire in every period, the shortest of which is half a second, and the last deadline is a day away.
        world.now = max(world.open.values(), default=world.now)
        self.ring(world)
        assert not world.open, "requests without an answer"

    def ring(self, world):
        for _ in range(300):
            world.settle()
            if world.alarm is None or not world.open:
                break
            world.ring()


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("end", ["as it is", "least", "most"])
def test_no_number_that_is_allowed_makes_a_policy_fail(name, end):
    policy: Policy = policy_named(name)
    if end != "as it is":
        ends = {key: getattr(bound, end) for key, bound in POLICY_BOUNDS.items() if key not in ("alpha", "beta")}
        ends["period_s"] = max(0.5, ends["period_s"])
        policy = msgspec.structs.replace(
            policy, **{k: int(v) if POLICY_BOUNDS[k].whole else v for k, v in ends.items()}
        )
    machine = type("Extremes", (Extremes,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=30, deadline=None))

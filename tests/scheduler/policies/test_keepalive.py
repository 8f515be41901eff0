"""How long an idle worker stays: by its settings, or by the function's history."""

from math import inf

import pytest

from overwinter.core.config import SchedulerConfig
from overwinter.core.policies import POLICIES
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.latency import LatencyModel
from overwinter.scheduler.policies.keepalive import GAPS, GAPS_LEAST, from_history, remember
from overwinter.scheduler.retention import idle_until
from overwinter.scheduler.state import Binding, Family, Function, Worker
from tests.scheduler.world import spec


def idle(policy, since, used, gaps=(), keep_alive_s=None):
    made = spec("f", keep_alive_s=keep_alive_s)
    family = Family(made.id, LatencyModel(made, policy))
    function = Function(made, family, False, {}, used_at=used, gaps=list(gaps))
    worker = Worker(1, made.id, family, "t", function.latency.default_point, since, {made.id: Binding(function)})
    return idle_until(Cycle(SchedulerConfig(policy=policy)), worker)


def test_a_fixed_keep_alive_restarts_on_reuse_of_the_worker():
    assert idle(POLICIES["tetris"], since=5.0, used=50.0) == 65.0
    assert idle(POLICIES["tetris"], since=5.0, used=50.0, keep_alive_s=90.0) == 95.0


def test_without_a_fixed_keep_alive_an_idle_worker_stays_unless_its_function_sets_one():
    assert idle(POLICIES["overwinter"], since=5.0, used=50.0) == inf
    assert idle(POLICIES["overwinter"], since=5.0, used=50.0, keep_alive_s=10.0) == 15.0


def test_a_history_counts_only_once_it_has_enough_gaps():
    assert from_history([1.0] * (GAPS_LEAST - 1), 60.0) == 60.0
    assert from_history([1.0] * GAPS_LEAST, 60.0) == 1.1
    assert from_history([1.0] * 7 + [10.0], 60.0) == pytest.approx(11.0)


def test_a_keep_alive_by_history_begins_at_the_last_use_of_the_function_and_is_at_least_one_period():
    policy = POLICIES["infless"]
    assert idle(policy, since=5.0, used=50.0, gaps=[0.1] * GAPS) == 50.0 + policy.period_s
    assert idle(policy, since=5.0, used=50.0, gaps=[20.0] * GAPS) == 50.0 + 22.0
    assert idle(policy, since=5.0, used=50.0, gaps=[90.0] * GAPS) == 110.0
    assert idle(policy, since=5.0, used=50.0, gaps=[0.1] * GAPS, keep_alive_s=2.0) == 52.0


def test_old_gaps_are_forgotten():
    gaps = []
    for number in range(2 * GAPS):
        remember(gaps, float(number))
    assert gaps == [float(number) for number in range(GAPS, 2 * GAPS)]

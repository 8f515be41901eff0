"""The sweep over the memory of idle workers counts cold starts, and its rules do what their names say."""

import argparse

import msgspec
import pytest

from benchmarks.keeping import RULES, functions, simulate

OPTIONS = argparse.Namespace(seed=1, seconds=200.0, traces=None)
MODELS = list(functions(12, traced=False))


def test_with_room_for_all_only_the_first_request_of_each_is_cold():
    point = simulate(MODELS, RULES["cost-aware"], 1.0, OPTIONS)
    longer = simulate(MODELS, RULES["cost-aware"], 1.0, argparse.Namespace(**{**vars(OPTIONS), "seconds": 400.0}))
    assert point.cold == pytest.approx(2 * longer.cold, rel=0.15)
    assert simulate(MODELS, RULES["lru"], 1.0, OPTIONS) == point


def test_less_memory_means_more_cold_starts_and_cost_aware_eviction_has_fewer_than_lru():
    small, large, lru = (
        simulate(MODELS, RULES[name], size, OPTIONS)
        for name, size in (("cost-aware", 0.2), ("cost-aware", 0.6), ("lru", 0.2))
    )
    assert large.cold < small.cold < lru.cold
    assert small.added_ms < lru.added_ms


def test_a_time_limit_gives_memory_back_and_costs_wakes():
    kept = simulate(MODELS, RULES["cost-aware"], 1.0, OPTIONS)
    limited = simulate(MODELS, msgspec.structs.replace(RULES["fixed"], keep_alive_s=20.0), 1.0, OPTIONS)
    assert limited.cold > kept.cold
    assert limited.mean_mib < kept.mean_mib

"""By default what costs least to bring again is evicted first."""

import msgspec
import pytest

from overwinter.scheduler.policies.device_eviction import RULES, Candidate

PLAIN = Candidate(unused_s=10.0, use_interval_s=10.0, nbytes=100, swap_s=0.05, run_s=0.02, replicas=0)


def first(rule, **candidates) -> str:
    made = {name: msgspec.structs.replace(PLAIN, **changes) for name, changes in candidates.items()}
    return min(made, key=lambda name: RULES[rule](made[name]))


def test_torpor_evicts_replicas_then_light_functions_then_heavy_ones_by_last_use():
    heavy, light, replica = {"unused_s": 99.0}, {"swap_s": 0.01}, {"replicas": 1, "unused_s": 1.0}
    assert first("torpor", heavy=heavy, light=light, replica=replica) == "replica"
    assert first("torpor", heavy=heavy, light=light) == "light"
    assert first("torpor", heavy=heavy, other={}) == "heavy"


def test_lru_evicts_what_was_unused_longest():
    assert first("lru", a={}, b={"unused_s": 11.0, "replicas": 0, "swap_s": 9.0}) == "b"


@pytest.mark.parametrize(
    "cheaper",
    [
        {"run_s": 0.05},
        {"replicas": 1},
        {"replicas": 1, "peer_s": 0.03, "unused_s": 5.0},
        {"use_interval_s": 100.0, "unused_s": 100.0},
        {"nbytes": 1000},
    ],
)
def test_the_default_evicts_by_the_time_to_wait_again_times_use_per_byte(cheaper):
    assert first("cost-aware", plain={}, cheaper=cheaper) == "cheaper"


def test_of_functions_whose_runs_hide_their_transfers_the_one_with_the_shorter_transfer_is_evicted_first():
    hidden = {"run_s": 1.0, "swap_s": 0.01}
    assert first("cost-aware", plain={"run_s": 1.0}, smaller=hidden) == "smaller"


def test_a_function_for_which_requests_wait_is_evicted_after_all_others():
    assert first("cost-aware", plain={}, wanted={"is_wanted": True, "unused_s": 99.0}) == "plain"


def test_a_replica_is_not_protected_by_what_waits_for_its_function():
    assert first("cost-aware", plain={}, replica={"is_wanted": True, "replicas": 1, "peer_s": 0.0}) == "replica"


def test_what_frees_nothing_is_evicted_last():
    assert (
        first("cost-aware", nothing={"nbytes": 0, "swap_s": 0.0}, often={"use_interval_s": 0.0, "unused_s": 0.0})
        == "often"
    )

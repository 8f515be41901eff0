"""A further device is worth its memory if requests would too often find the others busy, and then be late."""

import pytest

from overwinter.scheduler.policies.device_ahead import Demand, busy_share, wants_replica


def test_the_share_of_requests_that_find_all_devices_busy_follows_erlang_b():
    assert busy_share(0.0, 1) == 0.0
    assert busy_share(1.0, 1) == pytest.approx(1 / 2)
    # Erlang B: (a^n / n!) / sum of a^k / k!.
    assert busy_share(2.0, 3) == pytest.approx((8 / 6) / (1 + 2 + 4 / 2 + 8 / 6))
    assert busy_share(3.0, 0) == 1.0


@pytest.mark.parametrize(
    ("rate", "run_s", "swap_wait_s", "slo_s", "devices", "wanted"),
    [
        (8.0, 0.1, 0.5, 0.3, 1, True),
        (0.1, 0.1, 0.5, 0.3, 1, False),
        (8.0, 0.1, 0.5, 0.3, 4, False),
        # Bringing it on demand is fast enough, or nothing is.
        (8.0, 0.1, 0.1, 0.3, 1, False),
        (8.0, 0.4, 0.5, 0.3, 1, False),
        (8.0, 0.1, 0.5, None, 1, False),
        # Nothing is known of its run, or no device has it.
        (8.0, 0.0, 0.5, 0.3, 1, False),
        (8.0, 0.1, 0.5, 0.3, 0, False),
    ],
)
def test_a_replica_is_wanted_where_requests_would_be_late(rate, run_s, swap_wait_s, slo_s, devices, wanted):
    assert wants_replica(Demand(rate, run_s, swap_wait_s, slo_s, devices)) == wanted

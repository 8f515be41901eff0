"""Policies for devices: whether a function should be on one more device before a request needs it there.

A request that finds all devices of its function busy brings the blocks to another device, and is in time if that is
fast enough. So the function needs a further device only where that takes too long, and where the share of requests that
would find the others busy exceeds the share that may be late. They are busy as often as in a system without a queue
(Erlang B): a request that finds them busy does not wait for them, but goes to the further device.
"""

import msgspec

from overwinter.scheduler.policies.device_queueing import PERCENTILE


class Demand(msgspec.Struct, frozen=True):
    """The input of the policy about a function."""

    rate: float
    """The expected requests per second."""
    run_s: float
    """The time of a run of one request on a device that has all its blocks; 0: unknown."""
    swap_wait_s: float
    """The time for which a run on one more device would wait for blocks."""
    slo_s: float | None
    devices: int
    """The number of devices that have it."""


def busy_share(load: float, devices: int) -> float:
    """Return the share of requests that find all devices busy. `load`: the offered load, which is the mean number of
    devices in use if one were always free.
    """
    share = 1.0
    for count in range(1, devices + 1):
        share = load * share / (count + load * share)
    return share


def wants_replica(demand: Demand) -> bool:
    """Whether one more device should have the function."""
    if demand.slo_s is None or not demand.devices or demand.swap_wait_s + demand.run_s <= demand.slo_s:
        return False
    # No number of devices answers in time what runs too long.
    if demand.run_s > demand.slo_s:
        return False
    return busy_share(demand.rate * demand.run_s, demand.devices) > 1 - PERCENTILE

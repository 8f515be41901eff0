"""By default requests go to the device on which their function's execution waits least for blocks."""

from collections import Counter

from overwinter.core.devices import DeviceConfig
from overwinter.scheduler.policies.device_binding import (
    Choice,
    Option,
    Peer,
    at_random,
    fixed_device,
    least_wait,
    torpor,
    transfer_s,
)


def link(**settings) -> DeviceConfig:
    return DeviceConfig(name="d", memory_bytes=1 << 20, bytes_per_s=1e6, latency_s=0.5, **settings)


def test_devices_behind_one_switch_share_its_bandwidth():
    assert transfer_s(link(), 1_000_000, 3) == 1.5
    assert transfer_s(link(switch="s"), 1_000_000, 0) == 1.5
    assert transfer_s(link(switch="s"), 1_000_000, 1) == 2.5
    assert transfer_s(link(switch="s", switch_bytes_per_s=2e6), 1_000_000, 1) == 1.5
    assert transfer_s(link(), 0, 0) == 0.0


def test_the_default_is_the_device_on_which_the_execution_waits_least():
    options = [Option("a", 10, 0.3), Option("b", 50, 0.1), Option("c", 40, 0.1)]
    assert least_wait(options, 1) == Choice("c")
    fast = Option("a", 10, 0.3, peers=(Peer("b", 1e9, 0.05, has_all=False),))
    assert least_wait([fast, *options[1:]], 1) == Choice("a", "b")


def test_the_default_spares_the_host_where_the_execution_hides_every_transfer():
    near = Option("b", 10, 0.0, "heavy", peers=(Peer("x", 1e9, 0.0, has_all=False, host_bytes=4),))
    assert least_wait([Option("a", 10, 0.0), near], 1) == Choice("b", "x")
    assert least_wait([Option("a", 10, 0.0, "heavy"), Option("b", 10, 0.0, "light")], 1) == Choice("b")
    assert least_wait([near, Option("c", 0, 0.0)], 1) == Choice("c")


def test_torpor_takes_a_device_with_the_function_then_the_fastest_pair_then_a_quiet_switch():
    with_peers = Option("a", 10, 0.0, peers=(Peer("x", 1.0, 0.0, True), Peer("y", 9.0, 0.0, False)))
    faster = Option("b", 10, 9.0, peers=(Peer("x", 5.0, 0.0, True),))
    assert torpor([with_peers, faster, Option("c", 0, 0.0, "heavy")], 1) == Choice("c")
    assert torpor([with_peers, faster], 1) == Choice("b", "x")
    busy = [Option("a", 1, 0.0, "heavy"), Option("b", 9, 0.0, "light"), Option("c", 99, 9.0, "nothing")]
    assert torpor(busy, 1) == Choice("c")
    assert torpor(busy[:2], 1) == Choice("b")
    assert torpor(busy[:1], 1) == Choice("a")
    assert torpor([Option("a", 9, 0.0), Option("b", 2, 0.0)], 1) == Choice("b")
    assert torpor([Option("a", 10, 0.0, short_bytes=5), Option("b", 10, 0.0)], 1) == Choice("b")


def test_random_binding_keeps_to_a_device_with_the_function_and_spreads_otherwise():
    options = [Option(name, 5, 0.0) for name in "abcd"]
    counts = Counter(at_random(options, run).device for run in range(1000))
    assert set(counts) == set("abcd")
    assert min(counts.values()) > 200
    assert at_random(options, 7) == at_random(options, 7)
    assert at_random([*options, Option("e", 0, 0.0)], 7) == Choice("e")


def test_a_fixed_device_is_the_device_on_which_most_bytes_remain():
    assert fixed_device({"a": 3, "b": 7, "c": -1}) == "b"
    assert fixed_device({"a": -1}) is None

"""The metrics of the devices of the pool. A node without devices has none of them."""

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import Metric

from overwinter.core.ids import DeviceId
from overwinter.scheduler.pool import DeviceState
from overwinter.scheduler.snapshot import DeviceSnapshot
from overwinter.telemetry.exposition import counter, gauge
from overwinter.telemetry.pool import TrackedDevice
from overwinter.telemetry.statistics import FunctionStatistics, Statistics

DEVICE = ["device"]
OWN = ["device", "function"]


def device_metrics(
    devices: Sequence[DeviceSnapshot], statistics: Statistics, tallies: Sequence[FunctionStatistics]
) -> Iterator[Metric]:
    """The metrics of the devices and of the runs there."""
    yield from _devices(devices)
    yield from _executors(devices, statistics)
    yield from _runs(tallies)


def _devices(devices: Sequence[DeviceSnapshot]) -> Iterator[Metric]:
    states = (((each.name, state), each.state == state) for each in devices for state in get_args(DeviceState))
    yield gauge("device_state", "1 for the current state of a device, 0 for the others.", [*DEVICE, "state"], states)
    taken = (((each.name,), each.taken_bytes) for each in devices)
    yield gauge("device_bytes", "Bytes of the blocks on a device, each block once.", DEVICE, taken)
    total = (((each.name,), each.total_bytes) for each in devices)
    yield gauge("device_budget_bytes", "Memory of a device for blocks.", DEVICE, total)
    functions = (((each.name,), len(each.residents)) for each in devices)
    yield gauge("device_functions", "Functions and slices with blocks on a device.", DEVICE, functions)


def _executors(devices: Sequence[DeviceSnapshot], statistics: Statistics) -> Iterator[Metric]:
    seen = [statistics.pool.devices.get(each.name) or _unused(each.name) for each in devices]
    starts = (((each.name,), each.starts) for each in seen)
    yield counter("executor_starts", "Executors that were started.", DEVICE, starts)
    crashes = (((each.name,), each.crashes) for each in seen)
    help_text = (
        "Executors that died, whose device failed, or that were killed because a start or a run did not end in time."
    )
    yield counter("executor_crashes", help_text, DEVICE, crashes)
    prepared = (((each.name,), each.prepared) for each in seen)
    help_text = (
        "Preparations of functions that an idle device began before their first request there, without a transfer."
    )
    yield counter("device_preparations", help_text, DEVICE, prepared)
    prefetches = (((each.name,), each.prefetches) for each in seen)
    help_text = "Functions and slices whose blocks were transferred to a device before a request needed them there."
    yield counter("device_prefetches", help_text, DEVICE, prefetches)
    unplaced = (((each.name,), each.unplaced) for each in seen)
    help_text = "Attempted runs whose blocks did not fit, because the free memory of the device was not contiguous."
    yield counter("device_placement_failures", help_text, DEVICE, unplaced)


def _unused(name: DeviceId) -> TrackedDevice[FunctionStatistics]:
    return TrackedDevice(name)


def _runs(tallies: Sequence[FunctionStatistics]) -> Iterator[Metric]:
    seen = [((device, each.name), counts) for each in tallies for device, counts in list(each.by_device.items())]
    yield counter("device_runs", "Ended runs on a device.", OWN, ((key, each.runs) for key, each in seen))
    help_text = (
        "Time of ended runs on a device, with the transfers for which they waited; that of a shared run is divided "
        "among the functions in proportion to their requests."
    )
    yield counter("device_run_seconds", help_text, OWN, ((key, each.run_s) for key, each in seen))
    help_text = "Ended runs whose blocks were all on the device."
    yield counter("device_hits", help_text, OWN, ((key, each.hits) for key, each in seen))
    help_text = "Ended runs that brought missing bytes (swaps)."
    yield counter("device_misses", help_text, OWN, ((key, each.misses) for key, each in seen))
    help_text = "Bytes that were transferred to a device for runs; not those that were transferred before a request."
    yield counter("device_moved_bytes", help_text, OWN, ((key, each.moved_bytes) for key, each in seen))
    help_text = "The part of the moved bytes that came from other devices."
    yield counter("device_peer_bytes", help_text, OWN, ((key, each.peer_bytes) for key, each in seen))

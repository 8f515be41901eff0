"""Measures the link to a device: the time of transfers by their size."""

import time

import torch

from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import Address, TenantId
from overwinter.device.link import Link
from overwinter.device.swap import Route, transfer_times
from overwinter.worker.own_device import reserve_device

SIZES = tuple(1 << power for power in range(14, 27))
"""The sizes of the transfers: 16 KiB to 64 MiB."""
ROUNDS = 5
_BLOCK = Address("0" * 64)


def link_times(config: DeviceConfig) -> dict[int, float]:
    """Return the seconds of one transfer of each size from the host, the best of several. The device may be in use, but
    must have as much free memory as `config` reserves. Raises the errors of `own_device`.
    """
    device = reserve_device(config)
    device.hold("elbow", TenantId("elbow"), {_BLOCK: SIZES[-1]})
    link = Link(config.bytes_per_s, time.perf_counter, time.sleep, config.latency_s)
    route = Route(device.host({_BLOCK: torch.ones(SIZES[-1], dtype=torch.uint8)}), link)
    times = transfer_times(device, route, _BLOCK, SIZES, time.perf_counter, ROUNDS)
    device.close()
    return times

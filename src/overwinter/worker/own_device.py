"""What an executor needs to run a function: its device, and how blocks reach it."""

import mmap
import time
from collections.abc import Sequence
from ctypes import c_double, sizeof
from typing import NamedTuple

from overwinter.core.devices import DeviceConfig, DeviceKind
from overwinter.device.cuda import CudaDevice
from overwinter.device.interface import Device
from overwinter.device.link import Link, Switch
from overwinter.device.null import NullDevice
from overwinter.device.partitioned import allocator_of
from overwinter.device.swap import SwapSettings
from overwinter.device.virtual import VirtualDevice
from overwinter.worker.channel import close_all
from overwinter.worker.executor_messages import Reserve
from overwinter.worker.peers import Peers


class OwnDevice(NamedTuple):
    """A device, its memory for what runs compute, and how blocks of the host and of other devices reach it."""

    device: Device
    kind: DeviceKind
    activation_bytes: int
    link: Link
    swap_settings: SwapSettings
    peers: Peers


def own_device(config: DeviceConfig, order: Reserve, fds: Sequence[int]) -> OwnDevice:
    """Reserve the memory of a device. `fds`: those of the message (`Reserve`), which are closed. Raises OSError,
    ValueError or RuntimeError if the system refuses, and WorkerError if PyTorch cannot use the GPU.
    """
    memory = fds[0] if order.shared else None
    free_at = fds[-1] if order.sharers else None
    try:
        device, link = reserve_device(config, memory), _link_of(config, order.sharers, free_at)
    finally:
        close_all(fds)
    return OwnDevice(
        device, config.kind, config.activation_bytes, link, SwapSettings(config.group_bytes), Peers(config)
    )


def reserve_device(config: DeviceConfig, shared: int | None = None) -> VirtualDevice | CudaDevice:
    """Reserve the memory of a device. `shared`: a file for it, if other devices may copy from it. Raises the errors of
    `own_device`.
    """
    allocator = allocator_of(config.memory_bytes)
    if config.kind == "null":
        return NullDevice(config.name, allocator)
    if config.kind == "cuda":
        return CudaDevice(config.name, allocator, config.gpu, config.activation_bytes)
    return VirtualDevice(config.name, allocator, shared)


def _link_of(config: DeviceConfig, sharers: int, free_at: int | None) -> Link:
    """Return the link from the host. `free_at`: the file with the time when its switch is free."""
    switch = None
    if free_at is not None:
        free_at_s = c_double.from_buffer(mmap.mmap(free_at, sizeof(c_double)))
        switch = Switch(config.switch_bytes_per_s or config.bytes_per_s, sharers, free_at_s)
    return Link(config.bytes_per_s, time.perf_counter, time.sleep, config.latency_s, switch)

"""What executors share: the memory of devices from which others may copy, and files with the time when a switch is next
free. It also computes how much memory each executor needs.
"""

import os
import weakref
from ctypes import c_double, sizeof

from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.device.shared import forbid_writing, shared_bytes, shared_memory, sized_file
from overwinter.worker.executor_messages import Reserve

DRIVER_BYTES = 3 << 30
"""The private memory of this machine that the driver of a GPU and PyTorch's libraries for it take (1.4 GiB were
measured).
"""
ADDRESSES_BYTES = 1 << 42
"""The address space for what the driver of a GPU reserves without memory, which grows with the memory of all GPUs."""


class SharedFile:
    """A descriptor that is closed with this object, or before."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)

    def open_read_only(self) -> int:
        """Return a descriptor through which the file can only be read; the caller closes it. Whoever writes to the file
        must have mapped it before. Raises OSError.
        """
        forbid_writing(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)


class SharedDevices:
    """The devices of a node, and which of them share memory and switches, as configured."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._devices = {device.name: device for device in config.devices}
        self._peers = {peer for device in config.devices for peer in device.peers}
        self._behind = [device.switch for device in config.devices]
        self._switches: dict[str, SharedFile] = {}

    def create_memory(self, device: DeviceConfig) -> SharedFile | None:
        """Create the memory of a device if another device may copy from it; otherwise return None. Raises OSError."""
        return SharedFile(shared_memory(device.memory_bytes)) if device.name in self._peers else None

    def private_bytes(self, device: DeviceConfig) -> int:
        """The private memory that the device's executor needs for blocks, or on a GPU for its driver."""
        if device.kind == "cuda":
            return DRIVER_BYTES
        return 0 if device.name in self._peers or device.kind == "null" else device.memory_bytes

    def mapped_bytes(self, device: DeviceConfig) -> int:
        """The most address space that the device's executor needs for shared memory; on a null device, for the
        addresses of blocks, which have no memory; on a GPU, for the addresses of its memory.
        """
        if device.kind == "cuda":
            return ADDRESSES_BYTES
        if device.kind == "null":
            return device.memory_bytes
        own = [device.memory_bytes] if device.name in self._peers else []
        return sum(map(shared_bytes, [*own, *(self._devices[peer].memory_bytes for peer in device.peers)]))

    def reserve_message(self, device: DeviceConfig, memory: SharedFile | None) -> tuple[Reserve, list[int]]:
        """Return the first message for the device's executor, and the descriptors of the message. Raises OSError."""
        fds = [] if memory is None else [memory.fd]
        if not device.switch:
            return Reserve(memory is not None), fds
        if device.switch not in self._switches:
            self._switches[device.switch] = SharedFile(sized_file("overwinter-switch", sizeof(c_double)))
        return Reserve(memory is not None, self._behind.count(device.switch)), [*fds, self._switches[device.switch].fd]

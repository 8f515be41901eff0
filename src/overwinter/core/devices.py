"""The configuration of the devices of a node's pool."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds
from overwinter.core.ids import DeviceId

DeviceKind = Literal["virtual", "cuda", "null"]
"""What a device is. A virtual one computes on the CPU, in a bounded memory of its own, behind a modelled link. A CUDA
device is an NVIDIA GPU. A null one moves no bytes: it takes the time of the link and of the functions' profiles, and
answers as if all weights and inputs were zeros.
"""

DeviceIsolation = Literal["none", "tenant", "function"]
"""Who shares the executor of a device: all tenants, the functions of one tenant, or nobody."""

ACTIVATION_BYTES = 1 << 30
"""The default of `activation_bytes`: enough for a batch of 8 of the largest models in `benchmarks.zoo` (measured by
`benchmarks.activations`).
"""

DEVICE_BOUNDS = {
    "gpu": Bound(0, 63, "", "no machine has as many"),
    "memory_bytes": Bound(1 << 20, 1 << 50, "bytes", "a function's blocks must fit, and no device has a PiB"),
    "activation_bytes": Bound(1 << 20, 1 << 50, "bytes", "every run has inputs, and no device has a PiB"),
    "bytes_per_s": Bound(1 << 10, 1 << 50, "bytes a second", "blocks must arrive in time", whole=False),
    "latency_s": seconds(0, 1, "each transfer waits for it"),
    "switch_bytes_per_s": Bound(1 << 10, 1 << 50, "bytes a second", "blocks must arrive in time", whole=False),
    "group_bytes": Bound(1, 1 << 40, "bytes", "a group holds at least a part of a block"),
}
"""The bounds of every number in the configuration of a device."""


GROUP_BYTES = 2 << 20
"""The size of groups if the link was not measured."""


GPU_PROCESS_BYTES = 600 << 20
"""The memory of this machine that the driver of a GPU takes in an executor (measured: 0.6 GiB)."""
EARLY_SHIFTS = (3, 2, 1)
"""The first groups have an eighth, a quarter and a half of `group_bytes`."""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: its memory, and the links over which blocks reach it."""

    name: DeviceId
    kind: DeviceKind = "virtual"
    gpu: int = 0
    """The number of a CUDA device's GPU on this machine."""
    memory_bytes: int
    """The memory for blocks, reserved when its executor starts."""
    activation_bytes: int = ACTIVATION_BYTES
    """The memory for what a run computes: inputs, results that are still needed, and what operators take meanwhile. A
    run that needs more is divided, or refused.
    """
    bytes_per_s: float = 12e9
    """The bandwidth of the link from the host."""
    latency_s: float = 20e-6
    """The time before the first byte of a transfer."""
    switch: str = ""
    """Devices with the same switch share its bandwidth; empty: the link has its bandwidth for itself."""
    switch_bytes_per_s: float | None = None
    """The bandwidth of the switch; None: that of the link."""
    peers: Mapping[DeviceId, float] = {}
    """The bandwidth of the links from other devices, in bytes a second."""
    group_bytes: int = GROUP_BYTES
    """The bytes of one transfer, except the first ones; best the elbow of the link, which `overwinter elbow` measures.
    """

    def __post_init__(self) -> None:
        check_bounds(self, DEVICE_BOUNDS)
        for peer, bytes_per_s in self.peers.items():
            fault = DEVICE_BOUNDS["bytes_per_s"].fault(f"the link from {peer!r}", bytes_per_s)
            if fault is not None:
                raise ValueError(fault)
        if self.kind != "virtual" and self.peers:
            raise ValueError(f"device {self.name!r} is a {self.kind} device, which has no links from other devices")

    @property
    def reserved_bytes(self) -> int:
        """The bytes of this machine's memory that the device and its executor take."""
        if self.kind == "cuda":
            return GPU_PROCESS_BYTES
        return 0 if self.kind == "null" else self.memory_bytes + self.activation_bytes


def early_groups(group_bytes: int) -> tuple[int, ...]:
    """Return the sizes of the first transfers of a swap, each twice the one before. A program waits for the first
    before it begins, and its first calls seldom read many bytes.
    """
    return tuple(group_bytes >> shift for shift in EARLY_SHIFTS)


def gpus_of(devices: Sequence[DeviceConfig]) -> tuple[int, ...]:
    """Return the GPUs of CUDA devices."""
    return tuple(each.gpu for each in devices if each.kind == "cuda")


def check_devices(devices: Sequence[DeviceConfig]) -> None:
    """Raise ValueError if two devices have one name or one GPU, or a link is not from another device of the node."""
    names, gpus = [each.name for each in devices], gpus_of(devices)
    for each in devices:
        if names.count(each.name) > 1:
            raise ValueError(f"two devices are called {each.name!r}")
        if each.kind == "cuda" and gpus.count(each.gpu) > 1:
            raise ValueError(f"device {each.name!r} shares GPU {each.gpu} with another device")
        for peer in each.peers:
            if peer == each.name or peer not in names:
                raise ValueError(f"device {each.name!r} has a link from {peer!r}, which is not another device")

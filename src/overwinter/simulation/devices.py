"""One device of a simulated pool: the blocks in its memory, and how fast more can be brought."""

from collections import Counter
from collections.abc import Collection, Mapping
from math import ceil

from overwinter.core.devices import DeviceConfig, early_groups
from overwinter.core.ids import Address, DeviceId, FunctionId
from overwinter.simulation.links import SharedLink
from overwinter.simulation.timeline import Timeline

BlockSizes = Mapping[Address, int]
"""The bytes of each block."""


class DeviceMemory:
    """The blocks on a device, each once, and the functions for which they are there."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.functions: dict[FunctionId, BlockSizes] = {}
        self.nbytes = 0
        self.coming: Collection[Address] = ()
        """The blocks that are there only when the transfer in progress has ended."""
        self._holders: Counter[Address] = Counter()

    def missing(self, blocks: BlockSizes) -> dict[Address, int]:
        """Return those of these blocks that are not on the device."""
        return {address: nbytes for address, nbytes in blocks.items() if not self._holders[address]}

    def has(self, address: Address) -> bool:
        """Whether another device can copy the block."""
        return bool(self._holders[address]) and address not in self.coming

    def hold(self, function: FunctionId, blocks: BlockSizes) -> None:
        """Add a function's blocks. Raises OverflowError if they do not fit."""
        if function in self.functions:
            return
        self.nbytes += sum(self.missing(blocks).values())
        if self.nbytes > self.capacity_bytes:
            raise OverflowError(f"{self.nbytes} bytes on a device of {self.capacity_bytes}, with those of {function}")
        self.functions[function] = blocks
        self._holders.update(blocks.keys())

    def forget(self, function: FunctionId) -> None:
        """Evict a function: free the blocks that no other holds."""
        blocks = self.functions.pop(function, {})
        self._holders.subtract(blocks.keys())
        self.nbytes -= sum(self.missing(blocks).values())

    def clear(self) -> None:
        """Forget everything: the executor has ended."""
        self.functions.clear()
        self._holders.clear()
        self.nbytes = 0
        self.coming = ()


class SimulatedDevice:
    """A device and its links."""

    def __init__(self, config: DeviceConfig, host: SharedLink, timeline: Timeline) -> None:
        self.config = config
        self.memory = DeviceMemory(config.memory_bytes)
        self.host_link = host
        """The link between it and the host; that of a switch, if it is behind one."""
        self.peer_links: Mapping[DeviceId, SharedLink] = {
            name: SharedLink(bytes_per_s, timeline) for name, bytes_per_s in config.peers.items()
        }

    def transfer_s(self, nbytes: int, bytes_per_s: float) -> float:
        """Return the seconds of a transfer that is alone on its link; each group adds the link's latency."""
        groups, left = 0, nbytes
        for size in early_groups(self.config.group_bytes):
            groups += left > 0
            left -= size
        groups += ceil(max(0, left) / self.config.group_bytes)
        return groups * self.config.latency_s + nbytes / bytes_per_s

    def first_group_s(self, missing_bytes: int, bytes_per_s: float) -> float:
        """Return the time before the program can begin."""
        first, *_ = early_groups(self.config.group_bytes)
        return self.transfer_s(min(missing_bytes, first), bytes_per_s)


def simulated_devices(configs: Collection[DeviceConfig], timeline: Timeline) -> dict[DeviceId, SimulatedDevice]:
    """Return the devices by name. The bandwidth of a switch is the least that the configuration of a device behind it
    states: its `switch_bytes_per_s`, or its `bytes_per_s` if that is None.
    """
    bandwidths: dict[str, float] = {}
    for each in configs:
        own = each.switch_bytes_per_s or each.bytes_per_s
        bandwidths[_link(each)] = min(own, bandwidths.get(_link(each), own))
    made = {name: SharedLink(bytes_per_s, timeline) for name, bytes_per_s in bandwidths.items()}
    return {each.name: SimulatedDevice(each, made[_link(each)], timeline) for each in configs}


def _link(config: DeviceConfig) -> str:
    """Return the key of the link that a device shares with those behind the same switch; without one, of its own."""
    return f"switch {config.switch}" if config.switch else f"link {config.name}"

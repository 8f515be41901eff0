"""Policies for devices: on which free device a function's requests run (Torpor 5.3).

By default, what decides is the time until the function's missing blocks are on a device, as far as its execution does
not hide it. The baselines `native` and `infless` bind a function to one device before its first run: the function then
has only this option, and `fixed_device` chooses the device.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import DeviceId
from overwinter.core.policies import DeviceBinding

Swapping = Literal["nothing", "light", "heavy"]
"""What a device brings from the host now: nothing, a function whose execution hides the transfer, or one whose
execution does not.
"""
_INTERFERENCE: Mapping[Swapping, int] = MappingProxyType({"nothing": 0, "light": 1, "heavy": 2})


class Peer(NamedTuple):
    """Another device that has some of the missing blocks."""

    device: DeviceId
    bytes_per_s: float
    swap_wait_s: float
    """The time that the execution waits for blocks, if this device provides those that it has."""
    has_all: bool
    """Whether the whole function is resident there."""
    host_bytes: int = 0
    """The bytes that come from the host all the same."""


class Option(msgspec.Struct, frozen=True):
    """A free device."""

    device: DeviceId
    missing_bytes: int
    swap_wait_s: float
    """The time that the execution waits for blocks from the host, given what now passes through the device's switch."""
    neighbour: Swapping = "nothing"
    """What the other devices behind its switch bring now."""
    peers: tuple[Peer, ...] = ()
    short_bytes: int = 0
    """The bytes that must be evicted from it first."""


class Choice(NamedTuple):
    """A device, and the peer from which it copies the blocks that the peer has."""

    device: DeviceId
    peer: DeviceId | None = None


Rule = Callable[[Sequence[Option], int], Choice]
"""Chooses one of several options, which are ordered by how long each device was idle, the longest first; the number is
that of the run.
"""


def transfer_s(config: DeviceConfig, nbytes: int, sharing: int) -> float:
    """Return the time of a transfer from the host while this many other devices behind the switch bring blocks."""
    if not nbytes:
        return 0.0
    rate = config.bytes_per_s
    if config.switch:
        rate = min(rate, (config.switch_bytes_per_s or rate) / (sharing + 1))
    return config.latency_s + nbytes / rate


def is_heavy(swap_s: float, run_s: float) -> bool:
    """Whether a transfer takes longer than the execution that hides it."""
    return swap_s > run_s


def least_wait(options: Sequence[Option], run: int) -> Choice:
    """The device and the peer with which the execution waits least for blocks. A hidden transfer is not free either, so
    among equals: the fewest bytes from the host, then the fewest bytes in all, then the switch through which the host
    transfers least now, then the first of the options.
    """
    ways = [
        (swap_wait_s, host_bytes, each.missing_bytes, _beside(each, host_bytes), number, peer)
        for number, each in enumerate(options)
        for swap_wait_s, host_bytes, peer in (
            (each.swap_wait_s, each.missing_bytes, None),
            *((peer.swap_wait_s, peer.host_bytes, peer.device) for peer in each.peers),
        )
    ]
    *_, number, peer = min(ways, key=lambda way: way[:-1])
    return Choice(options[number].device, peer)


def _beside(option: Option, host_bytes: int) -> int:
    return _INTERFERENCE[option.neighbour] if host_bytes else 0


def torpor(options: Sequence[Option], run: int) -> Choice:
    """Torpor's algorithm 1: a device that has the function; otherwise the pair with the fastest link from a device that
    has it; otherwise a device behind whose switch nothing is brought, or a light function, or any.
    """
    least = min(options, key=lambda each: each.missing_bytes)
    if not least.missing_bytes:
        return Choice(least.device)
    pairs = [(peer.bytes_per_s, each.device, peer.device) for each in options for peer in each.peers if peer.has_all]
    if pairs:
        _, device, peer = max(pairs, key=lambda pair: pair[0])
        return Choice(device, peer)
    return Choice(min(options, key=_behind_switch).device)


def _behind_switch(option: Option) -> tuple[int, int, int]:
    return _INTERFERENCE[option.neighbour], option.missing_bytes, option.short_bytes


def at_random(options: Sequence[Option], run: int) -> Choice:
    """A device that has the function, otherwise any."""
    resident = [each for each in options if not each.missing_bytes]
    return Choice((resident[0] if resident else options[_mixed(run) % len(options)]).device)


def _mixed(number: int) -> int:
    """Return an even mix of the bits of a number (splitmix64), the same in every process."""
    mixed = (number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def fixed_device(free_bytes: Mapping[DeviceId, int]) -> DeviceId | None:
    """Return the device to which a function is bound: the one on which the most bytes would remain free; None: it fits
    on none. `free_bytes`: the bytes that would remain on each device, negative where the function does not fit.
    """
    fitting = {device: left for device, left in free_bytes.items() if left >= 0}
    return max(fitting, key=fitting.__getitem__, default=None)


RULES: Mapping[DeviceBinding, Rule] = MappingProxyType(
    {
        "missing-bytes": least_wait,
        "torpor": torpor,
        "random": at_random,
        "native": least_wait,
        "infless": least_wait,
    }
)

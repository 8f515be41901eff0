"""Brings the missing blocks of a function to a device while its program already runs there.

Blocks are transferred in groups, in first-use order. The program waits for a group before the first call that reads a
part of it. Only missing blocks move, so a variant of a resident function brings only what differs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch

from overwinter.core.devices import early_groups
from overwinter.core.errors import NoSpaceError, StoreError, WorkerError
from overwinter.core.ids import Address
from overwinter.device.function import DeviceFunction
from overwinter.device.interface import Copy, CopyPath, Device, Event, Source
from overwinter.device.link import Link

ELBOW_SHARE = 0.93
"""The share of the best throughput that a transfer of the elbow's size reaches. More throughput does not pay for a
larger first group, for which the program waits.
"""


class Route(NamedTuple):
    """A source of blocks, and the link from there to the device."""

    source: Source
    link: Link


class SwapSettings(NamedTuple):
    """How missing blocks are brought."""

    group_bytes: int
    """A group ends when it has this many bytes, the first ones earlier (`groups`)."""
    overlaps: bool = True
    """Whether the program runs while blocks are brought."""
    by_weight: bool = False
    """Whether groups consist of weights instead of blocks; with `group_bytes` 0, each of one weight."""


class SwapResult(NamedTuple):
    """The outputs of a run, and the bytes that came over each route for it."""

    outputs: tuple[torch.Tensor, ...]
    moved: tuple[int, ...]


class Group(NamedTuple):
    """One transfer: the number of its first route, its copies, and the first call that reads a part of them."""

    route: int
    copies: tuple[Copy, ...]
    first_use: int


def run(
    device: Device, function: DeviceFunction, inputs: Sequence[Any], routes: Sequence[Route], settings: SwapSettings
) -> SwapResult:
    """Run a function, bringing its missing blocks from the first source that has each.

    Raises NoSpaceError if they do not fit: something must be evicted first. Raises StoreError if one of them is in no
    source, and WorkerError if a transfer fails. After these and all other errors before the last block has arrived, the
    function is evicted.
    """
    # If this fails, nothing has to be evicted, because no block was placed for the run yet.
    inputs = device.bring(inputs)
    try:
        new = device.hold(function.name, function.tenant, function.blocks)
    except BaseException:
        device.evict(function.name)  # New blocks may have places, and they have no bytes.
        raise
    if new is None:
        lacking = sum(device.missing(function.blocks).values())
        raise NoSpaceError(f"{lacking} bytes of {function.name} do not fit on device {device.name}")
    missing = {address: function.blocks[address] for address in new}
    if not missing:
        return SwapResult(device.run(function.program.run, function.bind(device), inputs), (0,) * len(routes))
    failed = f"the blocks of {function.name} could not be brought to device {device.name}"
    arrivals = _Arrivals(failed, len(routes))
    try:
        return _swap(device, function, inputs, routes, settings, missing, arrivals)
    finally:
        if not arrivals.complete:
            device.evict(function.name)


def groups(copies: Sequence[tuple[Copy, int]], routes: Mapping[Address, int], group_bytes: int) -> Iterator[Group]:
    """Divide copies, in first-use order, into groups of one route that end when they have `group_bytes`. The first ones
    end earlier (`core.devices.early_groups`), so that the program begins earlier.
    """
    sizes = chain(early_groups(group_bytes), repeat(group_bytes))
    found: list[Copy] = []
    route = first_use = left = 0
    for copy, use in copies:
        if found and (left <= 0 or routes[copy.address] != route):
            yield Group(route, tuple(found), first_use)
            found = []
        if not found:
            route, first_use, left = routes[copy.address], use, next(sizes)
        found.append(copy)
        left -= copy.nbytes
    if found:
        yield Group(route, tuple(found), first_use)


def elbow(seconds: Mapping[int, float]) -> int:
    """Return the smallest transfer that comes near the best throughput, given the time of transfers of several sizes.

    Larger groups hardly save time, and let the program begin later.
    """
    best = max(nbytes / each for nbytes, each in seconds.items())
    return min(nbytes for nbytes, each in seconds.items() if nbytes / each >= ELBOW_SHARE * best)


def transfer_times(
    device: Device, route: Route, block: Address, sizes: Sequence[int], clock: Callable[[], float], rounds: int = 3
) -> dict[int, float]:
    """Measure the time of one transfer of each size, the best of several, with a block that the device holds. Raises
    WorkerError if one fails.
    """
    times: dict[int, float] = {}
    path = CopyPath(route.source.find({block: max(sizes)}), route.link)
    for nbytes in sizes:
        taken = []
        for _ in range(rounds):
            began = clock()
            if device.copy((Copy(block, 0, nbytes),), (path,)).bytes_by_path() is None:
                raise WorkerError(f"a transfer of {nbytes} bytes to device {device.name} failed")
            taken.append(clock() - began)
        times[nbytes] = min(taken)
    return times


class _Arrivals:
    """The transfers of one swap, by the first call that needs each."""

    def __init__(self, failed: str, routes: int) -> None:
        """`failed`: the beginning of the error's message if a transfer fails."""
        self._failed = failed
        self._events: dict[int, list[tuple[int, Event]]] = {}
        """For each call that waits: its transfers, each with the number of the first route that it may take."""
        self.moved = [0] * routes
        """The bytes that came over each route, when all transfers have ended."""
        self.all_asked_for = False
        """Whether no further transfer will be added."""
        self.complete = False
        """Whether all transfers of the swap have succeeded."""

    def add(self, group: Group, event: Event) -> None:
        """Let the first call that reads a part of the group wait for this event, with which the group has arrived."""
        self._events.setdefault(group.first_use, []).append((group.route, event))

    def wait(self, call: int) -> None:
        """Let this call wait for all that it needs (`Event.wait`); raise WorkerError if a transfer is known to have
        failed.
        """
        for _, event in self._events.get(call, ()):
            try:
                event.wait()
            except Exception as error:
                raise WorkerError(f"{self._failed}: {error}") from error

    def wait_all(self) -> None:
        """Wait for all transfers in the same way."""
        for call in self._events:
            self.wait(call)

    def finish(self) -> None:
        """Return when no transfer is in progress any more."""
        ended = [(first, event.bytes_by_path()) for events in self._events.values() for first, event in events]
        for first, moved in ended:
            for path, nbytes in enumerate(moved or ()):
                self.moved[first + path] += nbytes
        self.complete = self.all_asked_for and all(moved is not None for _, moved in ended)


def _swap(
    device: Device,
    function: DeviceFunction,
    inputs: Sequence[Any],
    routes: Sequence[Route],
    settings: SwapSettings,
    missing: Mapping[Address, int],
    arrivals: _Arrivals,
) -> SwapResult:
    copies = function.weight_copies(missing) if settings.by_weight else function.block_copies(missing)
    paths = [CopyPath(route.source.find(missing), route.link) for route in routes]
    try:
        chosen = {address: _route_of(address, paths) for address in missing}
        for group in groups(copies, chosen, settings.group_bytes):
            arrivals.add(group, device.copy(group.copies, paths[group.route :]))
        arrivals.all_asked_for = True
        weights = function.bind(device)  # While the first group is transferred.
        if settings.overlaps:
            outputs = device.run(function.program.run_waiting, weights, inputs, arrivals.wait)
        else:
            arrivals.wait_all()
            outputs = device.run(function.program.run, weights, inputs)
    finally:
        arrivals.finish()
    return SwapResult(outputs, tuple(arrivals.moved))


def _route_of(address: Address, paths: Sequence[CopyPath]) -> int:
    route = next((at for at, path in enumerate(paths) if address in path.found.blocks), None)
    if route is None:
        raise StoreError(f"block {address} lies in none of the places that it could be copied from")
    return route

"""The links over which blocks reach a simulated device, and how concurrent transfers share their bandwidth."""

from collections.abc import Callable
from functools import partial

import msgspec

from overwinter.simulation.machine import SAME_S
from overwinter.simulation.timeline import Timeline


class Transfer(msgspec.Struct, eq=False):
    """Bytes on their way to a device."""

    bytes_left: float
    bytes_per_s_max: float
    """Its rate when the shared link does not limit it."""
    arrived: Callable[[], None]
    bytes_per_s: float = 0.0


class SharedLink:
    """A switch, or the link of one device: its transfers share the bandwidth equally, up to their own limits."""

    def __init__(self, bytes_per_s: float, timeline: Timeline) -> None:
        self.bytes_per_s = bytes_per_s
        self._timeline = timeline
        self._transfers: dict[Transfer, None] = {}
        self._settled_at = 0.0
        self._changes = 0
        """The number of changes so far. The end of a transfer is not valid if it was scheduled before the last change.
        """

    def begin(self, transfer: Transfer) -> None:
        """Begin a transfer now."""
        self._settle()
        self._transfers[transfer] = None
        self._share()

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer that will not arrive."""
        self._settle()
        del self._transfers[transfer]
        self._share()

    def _settle(self) -> None:
        """Account for what was transferred up to now."""
        now = self._timeline.now
        for each in self._transfers:
            each.bytes_left -= (now - self._settled_at) * each.bytes_per_s
        self._settled_at = now

    def _share(self) -> None:
        """Divide the bandwidth, and schedule the next end."""
        self._changes += 1
        if not self._transfers:
            return
        free, sharers = self.bytes_per_s, len(self._transfers)
        for each in sorted(self._transfers, key=lambda transfer: transfer.bytes_per_s_max):
            each.bytes_per_s = min(each.bytes_per_s_max, free / sharers)
            free, sharers = free - each.bytes_per_s, sharers - 1
        first = min(self._transfers, key=_seconds_left)
        self._timeline.after(max(0.0, _seconds_left(first)), partial(self._end, first, self._changes))

    def _end(self, first: Transfer, change: int) -> None:
        """End the first transfer, and those that end at the same time, unless something has changed meanwhile."""
        if change != self._changes:
            return
        self._settle()
        ended = [each for each in self._transfers if each is first or _seconds_left(each) <= SAME_S]
        for each in ended:
            del self._transfers[each]
        self._share()
        for each in ended:
            each.arrived()


def _seconds_left(transfer: Transfer) -> float:
    return transfer.bytes_left / transfer.bytes_per_s

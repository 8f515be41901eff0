"""A model of the links over which blocks reach a device.

A transfer takes the latency of its link, and then the time of its bytes at the link's bandwidth. Links behind one
switch share the switch's bandwidth: the pieces of their transfers pass through it one after the other, so two that
transfer at once get half each. The time passes in sleep, so it overlaps with computation even on a single core.
"""

from collections.abc import Callable, Iterator
from ctypes import c_double
from typing import NamedTuple

PIECE_S = 1e-3
"""The time of a piece of a transfer at full bandwidth. It is longer than the error of a sleep, and much shorter than a
transfer.
"""


class Switch:
    """A switch, whose bandwidth several links share, also links of other processes."""

    def __init__(self, bytes_per_s: float, sharers: int = 2, free_at_s: c_double | None = None) -> None:
        """`sharers`: the number of links behind it. `free_at_s`: the time when it is free, in memory that the processes
        of the links share; None: all links are in this process.
        """
        self.bytes_per_s = bytes_per_s
        self._sharers = sharers
        self._free_at_s = c_double() if free_at_s is None else free_at_s

    def take(self, nbytes: int, from_s: float) -> float:
        """Return the time when the switch will have passed these bytes on, after all that came before.

        There is no lock, because a process could end while it holds the lock. If two processes call this at the same
        instant, one of the two pieces may not be counted.
        """
        own_s = nbytes / self.bytes_per_s
        others_s = self._free_at_s.value - from_s
        # Each of the others has at most one piece on the way, whatever another process has written.
        others_s = min(others_s, self._sharers * max(own_s, PIECE_S)) if others_s > 0 else 0.0
        free_at_s = self._free_at_s.value = from_s + others_s + own_s
        return free_at_s


class Link(NamedTuple):
    """A link from the host or another device to a device. `switch`: None if the link has its bandwidth for itself."""

    bytes_per_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    latency_s: float = 0.0
    switch: Switch | None = None

    @property
    def piece_bytes(self) -> int:
        """The bytes of a piece of a transfer."""
        return max(1, int(self.bytes_per_s * PIECE_S))

    def transfer_s(self, nbytes: int) -> float:
        """Return the time of one transfer if no other device uses the switch."""
        bytes_per_s = min(self.bytes_per_s, self.switch.bytes_per_s) if self.switch else self.bytes_per_s
        return self.latency_s + nbytes / bytes_per_s

    def transfer(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of each piece, for the caller to copy, and sleep after each until the link has
        transferred it. A sleep that lasts too long shortens the next ones.
        """
        at_s = self.clock() + self.latency_s
        for start in range(0, nbytes, self.piece_bytes):
            stop = min(start + self.piece_bytes, nbytes)
            yield start, stop
            earliest_s = at_s
            at_s += (stop - start) / self.bytes_per_s
            if self.switch is not None:
                at_s = max(at_s, self.switch.take(stop - start, earliest_s))
            self.sleep(max(0.0, at_s - self.clock()))

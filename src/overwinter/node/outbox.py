"""Sends messages to a process, and keeps those for which its socket has no room until the process has read others.

Many functions may be handed to an executor at once, or unbound during a long run, in which it reads nothing.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from overwinter.worker.channel import Channel, Packet, close_all

KEPT_FDS_MAX = 1 << 14
"""The most descriptors of packets that are kept: the node needs others too."""
OVERHEAD_BYTES = 256
"""What a kept packet takes beside its content."""


class Outbox:
    """The messages of the node to one process, in order."""

    def __init__(self, channel: Channel[Any], kept_bytes_max: int) -> None:
        """`kept_bytes_max`: the most bytes of packets that are kept; 0: none is."""
        self._channel = channel
        self._kept_bytes_max = kept_bytes_max
        self._kept: deque[Packet] = deque()
        """The packets that are not sent yet, with descriptors of their own."""
        self._kept_bytes = self._kept_fds = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything is sent."""
        return not self._kept

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message after all earlier ones, now or by `send_kept`. Raises BlockingIOError if too much is kept, and
        the errors of `Channel.send`.
        """
        for packet in self._channel.packets(message, fds):
            if self._kept or not self._try(packet):
                self._keep(packet)

    def send_kept(self) -> None:
        """Send what was kept, as far as the socket has room now. Raises the errors of `Channel.send`."""
        while self._kept and self._try(self._kept[0]):
            self._remove_first()

    def clear(self) -> None:
        """Forget what was kept."""
        while self._kept:
            self._remove_first()

    def _try(self, packet: Packet) -> bool:
        """Send a packet; return False if the socket has no room."""
        try:
            self._channel.send_packet(packet)
        except BlockingIOError:
            return False
        return True

    def _keep(self, packet: Packet) -> None:
        nbytes, count = self._kept_bytes + len(packet.content) + OVERHEAD_BYTES, self._kept_fds + len(packet.fds)
        if nbytes > self._kept_bytes_max or count > KEPT_FDS_MAX:
            raise BlockingIOError("it does not read its messages")
        own: list[int] = []
        try:
            for fd in packet.fds:
                own.append(os.dup(fd))  # noqa: PERF401 - after an error, the earlier ones are closed
        except OSError:
            close_all(own)
            raise
        self._kept.append(Packet(packet.content, own))
        self._kept_bytes, self._kept_fds = nbytes, count

    def _remove_first(self) -> None:
        packet = self._kept.popleft()
        self._kept_bytes -= len(packet.content) + OVERHEAD_BYTES
        self._kept_fds -= len(packet.fds)
        close_all(packet.fds)

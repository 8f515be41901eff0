"""Receives the messages that the node sends to a worker or an executor."""

import gc
import select
from collections.abc import Callable
from typing import Generic, TypeVar

from overwinter.worker.channel import Channel
from overwinter.worker.heap import release_heap

IDLE_MS = 2000
"""The idle time after which a process returns its free heap to the system. The next run takes longer, because it maps
the pages again.
"""

In = TypeVar("In")


class Inbox(Generic[In]):
    """The incoming side of a channel."""

    def __init__(self, channel: Channel[In], is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether the process runs something in other threads."""
        self._channel = channel
        self._is_busy = is_busy
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._heap_released = False

    def has_message(self) -> bool:
        """Whether a message waits, or the other end is closed."""
        return bool(self._poll.poll(0))

    def receive(self) -> tuple[In, list[int]]:
        """Return the next message and its descriptors; if none comes for IDLE_MS while nothing runs, release memory.
        Raises ChannelClosedError.
        """
        while not self._heap_released and not self._poll.poll(IDLE_MS):
            if not self._is_busy():
                gc.collect()
                release_heap()
                self._heap_released = True
        received = self._channel.receive()
        self._heap_released = False
        return received

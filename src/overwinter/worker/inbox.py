"""Receives the messages of a process that runs programs."""

import gc
import select
from collections.abc import Callable
from typing import Generic, TypeVar

from overwinter.worker.channel import Channel
from overwinter.worker.heap import release_heap

IDLE_MS = 100
"""The idle time after which a process returns its free heap to the system."""

In = TypeVar("In")


class Inbox(Generic[In]):
    """The incoming side of a channel."""

    def __init__(self, channel: Channel[In], is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether something runs while this waits."""
        self._channel = channel
        self._is_busy = is_busy
        self._waiting = select.poll()
        self._waiting.register(channel.fileno(), select.POLLIN)
        self._heap_released = False

    def has_message(self) -> bool:
        """Whether a message waits, or the other end is closed."""
        return bool(self._waiting.poll(0))

    def receive(self) -> tuple[In, list[int]]:
        """Return the next message and its descriptors; release memory while waiting. Raises ChannelClosedError."""
        while not self._heap_released and not self._waiting.poll(IDLE_MS):
            if not self._is_busy():
                gc.collect()
                release_heap()
                self._heap_released = True
        received = self._channel.receive()
        self._heap_released = False
        return received

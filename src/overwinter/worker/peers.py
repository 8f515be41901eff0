"""The other devices from which an executor may copy blocks: their memory, as far as the node has handed it over."""

import time
from collections.abc import Sequence
from contextlib import suppress

from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import StoreError
from overwinter.core.ids import DeviceId
from overwinter.device.link import Link
from overwinter.device.peer import PeerMemory
from overwinter.device.swap import Route
from overwinter.worker.channel import close_all
from overwinter.worker.executor_messages import BringFrom, PeerEnded


class Peers:
    """The memory of other devices, and the one from which the next run brings blocks."""

    def __init__(self, config: DeviceConfig) -> None:
        self._config = config
        self._memories: dict[DeviceId, PeerMemory] = {}
        self.routes: tuple[Route, ...] = ()
        """The route from the peer of the next run, if it has one."""

    def take(self, message: BringFrom | PeerEnded, fds: Sequence[int]) -> None:
        """Map the memory of the next run's peer, or unmap that of a device whose executor has ended."""
        if isinstance(message, PeerEnded):
            self._memories.pop(message.peer, None)
            return
        # What cannot be mapped is brought from the host.
        with suppress(StoreError):
            for fd in fds:
                self._memories[message.peer] = PeerMemory(fd)
        close_all(fds)
        memory = self._memories.get(message.peer)
        if memory is not None:
            bytes_per_s, latency_s = self._config.peers[message.peer], self._config.latency_s
            self.routes = (Route(memory, Link(bytes_per_s, time.perf_counter, time.sleep, latency_s)),)

    def run_ended(self) -> None:
        """The next run has no peer unless one is named again."""
        self.routes = ()

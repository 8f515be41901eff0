"""Verifies that the blocks in memory have not changed.

A flipped bit would give wrong answers as long as the block stays. So all blocks are hashed again, continuously one
after another, with a small share of one core. Blocks that an earlier run of the node left in memory come first, and
without pauses while cores are idle; a start that needs one of them earlier waits until it is hashed
(worker_actions.py).

A block whose hash does not match its address is dropped from memory, and every process that may use it is killed. The
block is loaded from the disk again when a function needs it.

The thread has a low priority, but not SCHED_IDLE: while it holds the GIL the loop may wait for it, so it must
make progress when other processes use all cores.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial

from overwinter.core.errors import MachineError
from overwinter.core.ids import Address, Seconds, StoreName
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.threads import Threads
from overwinter.store.host import HostStore
from overwinter.store.hosts import HostStores

ROUND_PAUSE_S = 1.0
"""The pause after each round of verification."""
PAUSE_S = 0.01
"""Shorter pauses are accumulated."""
CORE_CHECK_S = 0.05
"""The time between two checks, during a pause, whether there is a spare core again."""
NICE = 19


class StoppedError(Exception):
    """The node stops while a block is copied or verified."""


KillBlockReaders = Callable[[StoreName, Address], list[str]]
"""Kills the processes that may use a dropped block; returns their names."""


class Verifier:
    """Verifies all host stores of a node."""

    def __init__(
        self,
        hosts: HostStores,
        share: float,
        has_spare_core: Callable[[], bool],
        kill_block_readers: KillBlockReaders,
        log: Callable[[str], None],
    ) -> None:
        """Create it. `has_spare_core`: that of `Published`. The thread calls it after each chunk of a block that is not
        verified yet.
        """
        self._hosts = hosts
        self._share = share
        self._has_spare_core = has_spare_core
        self._kill_block_readers = kill_block_readers
        self._log = log
        self._thread = Threads(1, "verifier", _lower_priority)
        self._closing = threading.Event()
        self._begun = Seconds(0.0)
        self._due_pause_s = 0.0

    async def run(self, faults: Faults) -> None:
        """Verify blocks until cancelled; return at once if `share` is 0."""
        if not self._share:
            return
        try:
            while True:
                with faults.contained("blocks in memory"):
                    await self._pass(HostStore.unverified, self._is_intact_if_unverified)
                    await self._pass(HostStore.resident, self._is_intact)
                await asyncio.sleep(ROUND_PAUSE_S)
        finally:
            self._closing.set()
            self._thread.shutdown(wait=False)

    async def _pass(
        self,
        which: Callable[[HostStore], Iterable[Address]],
        check: Callable[[HostStore, Address], bool],
    ) -> None:
        """Verify the selected blocks of all stores, and kill the processes that may use a damaged one."""
        loop = asyncio.get_running_loop()
        for name, host in self._hosts.every().items():
            for address in list(which(host)):
                if not await loop.run_in_executor(self._thread, check, host, address):
                    self._kill_readers(name, address)

    def _is_intact_if_unverified(self, host: HostStore, address: Address) -> bool:
        """Verify a block that was not verified since the node started, without pauses while cores are idle."""
        # Another caller that needed the block may have verified it meanwhile.
        return not host.unverified([address]) or self._is_intact(host, address, self._pause_if_busy)

    def _is_intact(self, host: HostStore, address: Address, pause: Callable[[], None] | None = None) -> bool:
        self._begun = clock.now()
        after_chunk = partial(self._check_closing, pause or self._pause)
        try:
            return self._closing.is_set() or not host.holds(address) or host.verify(address, after_chunk)
        except (MachineError, StoppedError):
            # The block was evicted meanwhile, or the node stops.
            return True

    def _check_closing(self, pause: Callable[[], None]) -> None:
        """Pause between two chunks, and raise StoppedError if the node stops."""
        pause()
        if self._closing.is_set():
            raise StoppedError

    def _pause_if_busy(self) -> None:
        """Pause only while others need the cores."""
        self._add_due_pause()
        while not (has_core := self._has_spare_core()) and self._due_pause_s >= PAUSE_S and not self._closing.is_set():
            part = min(self._due_pause_s, CORE_CHECK_S)
            self._closing.wait(part)
            self._due_pause_s -= part
        if has_core:
            self._due_pause_s = 0.0
        self._begun = clock.now()

    def _pause(self) -> None:
        """Sleep until the work since the last pause was `share` of the elapsed time."""
        self._add_due_pause()
        if self._due_pause_s >= PAUSE_S:
            self._closing.wait(self._due_pause_s)
            self._due_pause_s = 0.0
        self._begun = clock.now()

    def _add_due_pause(self) -> None:
        self._due_pause_s += (clock.now() - self._begun) * (1 / self._share - 1)

    def _kill_readers(self, name: StoreName, address: Address) -> None:
        killed = self._kill_block_readers(name, address)
        names = f"; killed: {', '.join(killed)}" if killed else ""
        self._log(f"block {address} changed in memory and is read from disk again{names}")


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

"""Verifies that the blocks in memory have not changed.

A flipped bit would give wrong answers as long as the block stays. So all blocks are hashed again, continuously one
after another, with a small share of one core. Blocks that an earlier node left in memory come first, and without a
bound while cores are idle; a start that needs one of them earlier waits until it is hashed (placing.py). A block whose
hash does not match its address is dropped from memory together with every worker that has mapped it, and is loaded from
the disk again.

The thread has a low priority, but not SCHED_IDLE: while it holds the interpreter's lock the loop may wait for it, so it
must make progress when other processes use all cores.
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

EVERY_S = 1.0
"""Between two passes."""
PAUSE_S = 0.01
"""Shorter pauses are saved up."""
NICE = 19


class StoppedError(Exception):
    """The node stops: a block is not hashed to its end."""


Lost = Callable[[StoreName, Address], list[str]]
"""Told of a block that was dropped; names the workers that went with it."""


class Verifier:
    """Verifies all host stores of a node."""

    def __init__(
        self, hosts: HostStores, share: float, is_calm: Callable[[], bool], lost: Lost, log: Callable[[str], None]
    ) -> None:
        """`is_calm`: whether a core is idle and nothing waits. The thread calls it after each piece of a block."""
        self._hosts = hosts
        self._share = share
        self._is_calm = is_calm
        self._lost = lost
        self._log = log
        self._thread = Threads(1, "verifier", _yield_to_all)
        self._closing = threading.Event()
        self._begun = Seconds(0.0)
        self._owed_s = 0.0

    async def run(self, faults: Faults) -> None:
        """Hash blocks until cancelled; returns at once when no share of a core is given to it."""
        if not self._share:
            return
        try:
            while True:
                with faults.contained("blocks in memory"):
                    await self._pass(HostStore.unverified, self._is_known)
                    await self._pass(HostStore.resident, self._is_sound)
                await asyncio.sleep(EVERY_S)
        finally:
            self._closing.set()
            self._thread.shutdown(wait=False)

    async def _pass(
        self,
        which: Callable[[HostStore], Iterable[Address]],
        check: Callable[[HostStore, Address], bool],
    ) -> None:
        """Check those blocks of all stores; report the damaged ones."""
        loop = asyncio.get_running_loop()
        for name, host in self._hosts.every().items():
            for address in list(which(host)):
                if not await loop.run_in_executor(self._thread, check, host, address):
                    self._tell(name, address)

    def _is_known(self, host: HostStore, address: Address) -> bool:
        """Hash blocks that were not hashed since the node started, without a pause while cores are idle."""
        # Who needed it has had it hashed meanwhile.
        return not host.unverified([address]) or self._is_sound(host, address, self._yield)

    def _is_sound(self, host: HostStore, address: Address, pause: Callable[[], None] | None = None) -> bool:
        self._begun = clock.now()
        goes_on = partial(self._go_on, pause or self._pause)
        try:
            return self._closing.is_set() or not host.holds(address) or host.verify(address, goes_on)
        except (MachineError, StoppedError):
            # It left meanwhile, or nobody asks any more.
            return True

    def _go_on(self, pause: Callable[[], None]) -> None:
        """Between two pieces of a block."""
        pause()
        if self._closing.is_set():
            raise StoppedError

    def _yield(self) -> None:
        """Pause only while others want the cores."""
        if not self._is_calm():
            self._pause()
        self._begun = clock.now()

    def _pause(self) -> None:
        """Sleep for so long that the work since the last pause was the share of it all."""
        self._owed_s += (clock.now() - self._begun) * (1 / self._share - 1)
        if self._owed_s >= PAUSE_S:
            self._closing.wait(self._owed_s)
            self._owed_s = 0.0
        self._begun = clock.now()

    def _tell(self, name: StoreName, address: Address) -> None:
        workers = self._lost(name, address)
        replaced = f"; replaced: {', '.join(workers)}" if workers else ""
        self._log(f"block {address} changed in memory, and is read from disk again{replaced}")


def _yield_to_all() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

"""Defines the failures of periodic work that the node survives.

They are temporary shortages of the machine: memory, a descriptor, a file of the kernel, space on a disk. Such a failure
ends the current pass. It is logged once and counted, and the next pass runs as usual. A programming error is not among
them: it ends the node, so that it is noticed. Threads are all started in advance (threads.py).

Background work for one function is different: whatever it raises fails that work alone, because a function's author may
have caused it.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf

from overwinter.core.errors import MachineError, OverwinterError, WorkerError
from overwinter.node import clock

MACHINE = (OSError, MemoryError, MachineError)
"""The exceptions that failures of the machine raise."""
SETTLED_S = 60.0
"""A failure of the same work that did not occur for this long is logged when it occurs again."""


async def contain(work: Awaitable[object], failed: Callable[[Exception], None]) -> None:
    """Await background work for one function. `failed` gets what it raises; an error of the node's own code becomes a
    WorkerError.
    """
    try:
        await work
    except (OverwinterError, *MACHINE) as error:
        failed(error)
    except Exception as error:  # noqa: BLE001 - the boundary to one function: the node goes on for all others
        failed(WorkerError(f"the node's own code failed ({type(error).__name__}: {error})"))


class Faults:
    """Contains and counts failures. Used on the event loop's thread only."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._last: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """The number of failures of each repeated task."""

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Catch failures of the machine in the context, and no other exceptions. `what`: the work, for the log."""
        try:
            yield
        except MACHINE as error:
            self._count(what, error)

    def _count(self, what: str, error: Exception) -> None:
        now = clock.now()
        self.counts[what] += 1
        if now - self._last.get(what, -inf) > SETTLED_S:
            self._log(f"periodic work failed and is repeated ({what}): {type(error).__name__}: {error}")
        self._last[what] = now

"""What may fail of what the node does again and again, without the node?

What the machine gives or does not give at a moment: memory, a descriptor, a file of the kernel's, room on a disk. Such
a failure ends the look in hand; it is told once, counted, and the next look comes as ever. A mistake of ours is none of
these: it ends the node, and is seen. Threads are not asked for at a moment (threads.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from overwinter.core.errors import MachineError
from overwinter.node import clock

MACHINE = (OSError, MemoryError, MachineError)
"""What the machine's failures are raised as."""
SETTLED_S = 60.0
"""What failed and has not failed again for so long is told anew."""


class Faults:
    """Contains and counts failures. Belongs to the loop's thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._last: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """For each thing that is done again and again, how often it failed."""

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Let the machine's failures end what is done within, and nothing else."""
        try:
            yield
        except MACHINE as error:
            self._count(what, error)

    def _count(self, what: str, error: Exception) -> None:
        now = clock.now()
        self.counts[what] += 1
        if now - self._last.get(what, -inf) > SETTLED_S:
            self._log(f"the node could not look after its {what}, and tries again: {type(error).__name__}: {error}")
        self._last[what] = now

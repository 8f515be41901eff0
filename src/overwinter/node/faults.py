"""Contains failures of work that nobody waits for: the node goes on, because a tenant may have caused them.

A failure ends the current pass of periodic work, and the next pass runs as usual. It is counted, and logged unless the
same work failed shortly before. Most failures are temporary: memory, descriptors or disk space run out, or a file of
/proc or /sys cannot be read. Any other is a mistake in the node's own code, and is logged as an error with its
traceback. Background work for one function fails alone.
"""

import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf

from overwinter.core.errors import MachineError, OverwinterError, WorkerError
from overwinter.node import clock
from overwinter.node.log import Level, Log

MACHINE = (OSError, MemoryError, MachineError)
"""The exceptions that failures of the machine raise."""
SETTLED_S = 60.0
"""A failure is logged if the same work has not failed for this long."""


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

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """The number of failures of each work."""

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Catch any failure in the context. `what`: the work, for the log."""
        try:
            yield
        except MACHINE as error:
            self._count(what, error, "warning")
        except Exception as error:  # noqa: BLE001 - the boundary of work that nobody waits for
            self._mistaken(what, error)

    def _mistaken(self, what: str, error: Exception) -> None:
        self._count(what, error, "error")

    def _count(self, what: str, error: Exception, level: Level) -> None:
        now = clock.now()
        self.counts[what] += 1
        if now - self._last.get(what, -inf) > SETTLED_S:
            lines = [f"{type(error).__name__}: {error}"] if level == "warning" else traceback.format_exception(error)
            self._log(f"work failed and the node continues ({what}): {''.join(lines)}", level=level)
        self._last[what] = now

"""Writes the output of processes to the node's log, line by line, with the name of the process. Passes the lines of
workers also to the record of their family (recent_output.py).

Each worker has its own pipe, so that no worker can block, fill or garble the output of others. A tenant may have
hundreds of workers, so what the node does for all pipes together is bounded: the pipes are read some at a time,
round-robin by tenant, and the lines are limited for each pipe, for each tenant and for all. Output waits in its pipe
until it is read; lines beyond a limit are counted and dropped.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable

from overwinter.core.ids import FunctionId, TenantId
from overwinter.node.log import Log

READ_BYTES = 64 << 10
"""The bytes that are read at once: the capacity of a pipe."""
PAUSE_S = 0.05
"""The shortest time between two rounds of reads."""
PIPES_AT_ONCE = 16
"""The most pipes that are read in one round."""
WINDOW_S = 1.0
"""The period for which the following limits hold; further output is dropped."""
LINES_MAX, BYTES_MAX = 100, 64 << 10
"""The limits for one pipe."""
ALL_LINES_MAX, ALL_BYTES_MAX = 500, 256 << 10
"""The limits for all pipes, divided equally among the tenants whose processes print."""
REPORTS_MAX = 10
"""The most pipes of a tenant whose dropped lines are reported separately at the end of a period."""
LINE_BYTES_MAX = 4096
"""The most bytes of a line; the rest of a longer line is cut off or becomes another line."""


class Outputs:
    """The pipes of all processes. Used on the event loop's thread only."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._readable: dict[TenantId | None, dict[Output, None]] = {}
        """The pipes to read, by tenant; the tenant that has waited longest for its turn first."""
        self._reading: asyncio.TimerHandle | None = None
        self._read_at = 0.0
        """When pipes may be read again."""
        self._window: asyncio.TimerHandle | None = None
        self._lines: Counter[TenantId | None] = Counter()
        self._bytes: Counter[TenantId | None] = Counter()
        self._tenants_before = 0
        """The number of tenants whose processes printed in the previous window."""
        self._printed: dict[Output, None] = {}
        """The pipes with output in this window."""

    def open(self, who: str, tenant: TenantId | None = None, keep: Callable[[str], None] | None = None) -> "Output":
        """Open a pipe for a process. `keep` gets each logged line, without the name of the process. Raises OSError when
        the system has no descriptors left.
        """
        return Output(self, who, tenant, keep)

    def read_soon(self, pipe: "Output") -> None:
        """Read a pipe in its tenant's turn."""
        self._readable.setdefault(pipe.tenant, {})[pipe] = None
        if self._reading is None:
            loop = asyncio.get_running_loop()
            self._reading = loop.call_at(max(loop.time(), self._read_at), self._read)

    def _read(self) -> None:
        loop = asyncio.get_running_loop()
        self._read_at = loop.time() + PAUSE_S
        for _ in range(min(PIPES_AT_ONCE, sum(map(len, self._readable.values())))):
            tenant = next(iter(self._readable))
            own = self._readable.pop(tenant)
            pipe = next(iter(own))
            del own[pipe]
            if own:
                self._readable[tenant] = own
            pipe.read()
        self._reading = loop.call_at(self._read_at, self._read) if self._readable else None

    def prints(self, pipe: "Output") -> None:
        """The pipe has output in this window."""
        self._printed[pipe] = None
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(WINDOW_S, self._end_window)

    def allow(self, tenant: TenantId | None, nbytes: int) -> bool:
        """Count a line if the limits allow it; return whether they do."""
        lines, all_bytes = self._lines[tenant] + 1, self._bytes[tenant] + nbytes
        tenants = max(self._tenants_before, len(self._lines.keys() | {tenant}))
        if lines > ALL_LINES_MAX // tenants or all_bytes > ALL_BYTES_MAX // tenants:
            return False
        self._lines[tenant], self._bytes[tenant] = lines, all_bytes
        return True

    def closes(self, pipe: "Output") -> None:
        """Forget a pipe, and report how many lines were dropped, unless the limits forbid the report."""
        own = self._readable.get(pipe.tenant, {})
        if own.pop(pipe, 0) is None and not own:
            del self._readable[pipe.tenant]
        self._printed.pop(pipe, None)
        if pipe.dropped and self.allow(pipe.tenant, 0):
            pipe.report_dropped()

    def _end_window(self) -> None:
        self._window, self._tenants_before = None, len(self._lines)
        self._lines.clear()
        self._bytes.clear()
        reports, others, dropped = (Counter[TenantId | None]() for _ in range(3))
        for pipe in self._printed:
            tenant = pipe.tenant
            if pipe.dropped and reports[tenant] < REPORTS_MAX:
                reports[tenant] += 1
                pipe.report_dropped()
            elif pipe.dropped:
                others[tenant] += 1
                dropped[tenant] += pipe.dropped
            pipe.begin_window()
        self._printed.clear()
        for tenant, count in dropped.items():
            text = f"{count} more lines of {others[tenant]} other processes of tenant {tenant} were dropped"
            self.log(text, level="info")


class Output:
    """The reading end of one pipe, and the writing end for the process. Used on the event loop's thread only."""

    def __init__(self, outputs: Outputs, who: str, tenant: TenantId | None, keep: Callable[[str], None] | None) -> None:
        self.tenant = tenant
        self.dropped = 0
        """The lines dropped in this window."""
        self._outputs = outputs
        self._who = who
        self._function: FunctionId | None = None
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._near_end, self.far_end = os.pipe()
        os.set_blocking(self._near_end, False)
        self._rest = b""
        self._lines = self._bytes = 0
        self._loop.add_reader(self._near_end, self._is_readable)

    def assign(self, function: FunctionId) -> None:
        """Record the function whose worker the process is."""
        self._who, self._function = f"worker {function}", function

    def close_far_end(self) -> None:
        """Close the writing end, which the process has now."""
        if self.far_end >= 0:
            os.close(self.far_end)
            self.far_end = -1

    def close(self) -> None:
        """Log the rest and close the pipe, after the process has ended."""
        self.close_far_end()
        self._loop.remove_reader(self._near_end)
        # Read only once, as much as a pipe holds: another process may still have the writing end.
        with contextlib.suppress(BlockingIOError):
            self._take(os.read(self._near_end, READ_BYTES))
        if self._rest:
            self._add(self._rest)
        self._outputs.closes(self)
        os.close(self._near_end)

    def _is_readable(self) -> None:
        self._loop.remove_reader(self._near_end)
        self._outputs.read_soon(self)

    def read(self) -> None:
        """Read some output, and wait for more unless the process has closed its end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._near_end, READ_BYTES)
            if not data:
                return
            self._take(data)
        self._loop.add_reader(self._near_end, self._is_readable)

    def report_dropped(self) -> None:
        """Log how many lines were dropped in this window."""
        self._write(f"{self.dropped} more lines were dropped")

    def begin_window(self) -> None:
        """Begin to count anew."""
        self._lines = self._bytes = self.dropped = 0

    def _take(self, data: bytes) -> None:
        self._outputs.prints(self)
        # Lines beyond the limit are only counted: one read may have as many lines as bytes.
        *lines, rest = (self._rest + data).split(b"\n", LINES_MAX - self._lines)
        for line in lines:
            self._add(line)
        self.dropped += rest.count(b"\n")
        self._rest = rest[rest.rfind(b"\n") + 1 :]
        if len(self._rest) > LINE_BYTES_MAX:
            self._add(self._rest)
            self._rest = b""

    def _add(self, line: bytes) -> None:
        line = line[:LINE_BYTES_MAX]
        is_too_much = self._lines >= LINES_MAX or self._bytes + len(line) > BYTES_MAX
        if is_too_much or not self._outputs.allow(self.tenant, len(line)):
            self.dropped += 1
            return
        self._lines += 1
        self._bytes += len(line)
        self._write(_printable(line))

    def _write(self, text: str) -> None:
        self._outputs.log(f"{self._who}: {text}", level="info", function=self._function)
        if self._keep is not None:
            self._keep(text)


def _printable(line: bytes) -> str:
    """Replace control characters, so that a line cannot change how other lines are displayed."""
    text = line.decode(errors="replace").expandtabs().rstrip("\r")
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)

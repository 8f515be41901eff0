"""Writes the output of processes to the node's log, line by line, with the name of the process, and keeps that of
workers.

Each worker has its own pipe, so that no worker can block, fill or garble the output of others. A pipe is read at a
bounded rate: excess output waits in the pipe, and what exceeds a bound is counted and dropped.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable

from overwinter.core.ids import FunctionId
from overwinter.node.log import Log

READ_BYTES = 64 << 10
"""The bytes that are read at once: the capacity of a pipe."""
PAUSE_S = 0.05
"""The time between two reads."""
WINDOW_S = 1.0
"""The period for which the following limits hold; further output is dropped."""
LINES_MAX = 100
BYTES_MAX = 64 << 10
LINE_BYTES_MAX = 4096
"""The most bytes of a line; the rest of a longer line is cut off or becomes another line."""


class Output:
    """The reading end of one pipe, and the writing end for the process. Used on the event loop's thread only."""

    def __init__(self, who: str, log: Log, keep: Callable[[str], None] | None = None) -> None:
        """Open the pipe. `keep` gets each line as it was printed. Raises OSError when the system has no descriptors
        left.
        """
        self._who = who
        self._function: FunctionId | None = None
        self._log = log
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._near_end, self.far_end = os.pipe()
        os.set_blocking(self._near_end, False)
        self._rest = b""
        self._lines = self._bytes = self._dropped = 0
        self._pause: asyncio.TimerHandle | None = None
        self._window: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._near_end, self._receive)

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
        for timer in (self._pause, self._window):
            if timer is not None:
                timer.cancel()
        # Read once, which is the capacity of the pipe: another process may still have the writing end.
        with contextlib.suppress(BlockingIOError):
            self._take(os.read(self._near_end, READ_BYTES))
        if self._rest:
            self._add(self._rest)
        self._end_window()
        os.close(self._near_end)

    def _receive(self) -> None:
        self._loop.remove_reader(self._near_end)
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._near_end, READ_BYTES)
            if not data:
                return
            self._take(data)
        self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._near_end, self._receive)

    def _take(self, data: bytes) -> None:
        if self._window is None:
            self._window = self._loop.call_later(WINDOW_S, self._end_window)
        # Lines beyond the limit are only counted: one read may have as many lines as bytes.
        *lines, rest = (self._rest + data).split(b"\n", LINES_MAX - self._lines)
        for line in lines:
            self._add(line)
        self._dropped += rest.count(b"\n")
        self._rest = rest[rest.rfind(b"\n") + 1 :]
        if len(self._rest) > LINE_BYTES_MAX:
            self._add(self._rest)
            self._rest = b""

    def _add(self, line: bytes) -> None:
        line = line[:LINE_BYTES_MAX]
        if self._lines >= LINES_MAX or self._bytes + len(line) > BYTES_MAX:
            self._dropped += 1
            return
        self._lines += 1
        self._bytes += len(line)
        self._write(_printable(line))

    def _write(self, text: str) -> None:
        self._log(f"{self._who}: {text}", level="info", function=self._function)
        if self._keep is not None:
            self._keep(text)

    def _end_window(self) -> None:
        if self._dropped:
            self._write(f"{self._dropped} more lines were dropped")
        self._lines = self._bytes = self._dropped = 0
        self._window = None


def _printable(line: bytes) -> str:
    """Replace control characters, so that a line cannot change how other lines are displayed."""
    text = line.decode(errors="replace").expandtabs().rstrip("\r")
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)

"""How is a node started and stopped from a script, and how much memory do processes hold?"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import NoReturn, TextIO

START_S = 60.0
STOP_S = 20.0


class NodeError(RuntimeError):
    """The node did not start or ended by itself; it has said why."""


class Node:
    """A node in a process of its own; see `running_node`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ready(self) -> str:
        """Wait until it can serve, and return its URL; NodeError when it does not get there."""
        assert self.process.stdout is not None
        impatience = threading.Timer(START_S, self.process.kill)
        impatience.start()
        try:
            line = self.process.stdout.readline()
        finally:
            impatience.cancel()
        if not line:
            raise NodeError("the node did not start")
        return str(json.loads(line)["url"])

    def wait(self) -> NoReturn:
        """Wait for its end, which it should not come to; NodeError."""
        self.process.wait()
        raise NodeError("the node ended by itself")

    def processes(self) -> list[int]:
        """Its process ids: the daemon's, then those of all that it started."""
        parents = _parents()
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found


@contextmanager
def running_node(data: Path, *options: str, say: Callable[[str], None]) -> Iterator[Node]:
    """A node that serves the functions of `data`, with more options of `overwinter serve`; stopped at the end.

    What it writes to standard error is told to `say`, line by line, in another thread.
    """
    command = [sys.executable, "-m", "overwinter", "serve", "--json", "--no-profile-on-deploy"]
    command += ["--data", str(data), *options]
    # A session of its own: Ctrl-C reaches only this process, which then stops the node in order.
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        listener = threading.Thread(target=_relay, args=(process.stderr, say))
        listener.start()
        try:
            yield Node(process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            finally:
                # Nothing happens to one that has ended; the processes below one that has not die with it.
                process.kill()
                listener.join()


def own_bytes(pid: int) -> int:
    """Memory of a process that is no file's: what it shares with others (after a fork) counts in equal parts."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def file_bytes(directory: Path) -> int:
    """What the files below a directory occupy."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _relay(output: TextIO, say: Callable[[str], None]) -> None:
    for line in output:
        say(line.rstrip())


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                # It ended meanwhile.
                continue
            # The second field is the command in parentheses, which may hold spaces and more parentheses.
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return parents

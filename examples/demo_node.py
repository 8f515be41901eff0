"""Starts and stops a node from a script, and measures the memory of processes."""

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
    """The node did not start within START_S, or ended; its log may have the reason."""


class Node:
    """A node in a separate process; see `running_node`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ready(self) -> str:
        """Wait until the node is ready, and return its URL; raise NodeError if it fails."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise NodeError("the node did not start")
        return str(json.loads(line)["url"])

    def wait(self) -> NoReturn:
        """Wait for the end of the node, which is an error; raise NodeError."""
        self.process.wait()
        raise NodeError("the node ended by itself")

    def processes(self) -> list[int]:
        """Return the process ids of the daemon and of all its descendants."""
        parents = _parents()
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found


@contextmanager
def running_node(data: Path, *options: str, say: Callable[[str], None]) -> Iterator[Node]:
    """Run a node that serves the functions of `data`, with further options of `overwinter serve`; stop it at the end.

    Each line of its standard error is passed to `say`, in another thread.
    """
    command = [sys.executable, "-m", "overwinter", "serve", "--json", "--no-profile-on-deploy"]
    command += ["--data", str(data), *options]
    # A separate session: Ctrl-C reaches only this process, which then stops the node cleanly.
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
                # Has no effect on an ended process. The descendants of a killed daemon end with it.
                process.kill()
                listener.join()


def own_bytes(pid: int) -> int:
    """Return the anonymous and the shared memory of a process; pages that n processes map count 1/n in each."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def file_bytes(directory: Path) -> int:
    """Return the disk space of the files below a directory."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _relay(output: TextIO, say: Callable[[str], None]) -> None:
    for line in output:
        say(line.rstrip())


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
            except OSError:
                # The process ended meanwhile.
                continue
            # The second field is the command in parentheses, which may contain spaces and parentheses.
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return parents

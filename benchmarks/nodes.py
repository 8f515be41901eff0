"""Runs a real node for a benchmark: a daemon as users start it, with separate directories that are removed
afterwards.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.measure import cpu_ticks
from benchmarks.wire import Connection, get
from overwinter.api.client import Client
from overwinter.store.tokens import Quota, TokenFile

POLL_S = 0.002
QUIET_S = 0.25
PERIODIC_TICKS = 5
"""The daemon's periodic checks take up to so much processor time in QUIET_S, in clock ticks; more means that it works.
On a slow machine they took 1 or 2 in nearly every QUIET_S.
"""
PATIENCE_S = 120.0

N = TypeVar("N", bound="Node")


class Node:
    """`overwinter serve` in a separate process."""

    def __init__(
        self,
        data: Path,
        host_store: Path,
        options: tuple[str, ...],
        log: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        """Create it. Its standard error is appended to the file `log`, or joins that of this process. `python` is the
        interpreter in whose environment Overwinter is installed.
        """
        self.data = data
        self.host_store = host_store
        self.port_file = data.parent / "port"
        self.log = log
        self._command = [python, "-m", "overwinter", "serve", "--port", "0", "--no-profile-on-deploy"]
        self._command += ["--port-file", str(self.port_file), "--data", str(data), "--host-store", str(host_store)]
        self._command += options
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.client: Client

    def add_options(self, *options: str) -> None:
        """Add options for the next start."""
        self._command += options

    def start(self) -> float:
        """Start the daemon; return the seconds until it reports over HTTP that it is ready."""
        self.port_file.unlink(missing_ok=True)
        self.port = 0
        began = time.perf_counter()
        with open(self.log or os.devnull, "ab") as log:
            said = log if self.log else None
            self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=said)
        while not self.port_file.exists():
            if self.process.poll() is not None:
                status, self.process = self.process.returncode, None
                raise RuntimeError(f"the node ended with status {status}: {self._command}")
            time.sleep(POLL_S)
        port = int(self.port_file.read_text())
        with Connection(port) as connection:
            connection.ask(get("/v2/health/ready"))
        took = time.perf_counter() - began
        self.port = port
        self.client = Client(self.url)
        return took

    @property
    def url(self) -> str:
        """The URL of the daemon."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Stop the daemon as a service manager would, if it runs."""
        if self.process is None:
            return
        if self.port:
            self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process = None

    def require_tokens(self) -> str:
        """Make a token: from now on the node requires one. Its tenant's quota of requests is never reached."""
        tokens = TokenFile(self.data)
        tokens.limit("bench", Quota(requests_per_s=1e6))
        return tokens.create("bench", ("infer", "deploy"), "", time.time())[1]

    def close_connections(self) -> None:
        """Close the connections of `client`, which count among the node's descriptors; the next call opens new ones."""
        self.client.close()
        self.client = Client(self.url)

    def pids(self) -> list[int]:
        """Return the pids of the daemon and of all processes below it, the daemon's first."""
        if self.process is None:
            return []
        found = [self.process.pid]
        parents = parents_of_all()
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def own_pids(self) -> list[int]:
        """Return the pids of the daemon, its zygotes and processes forked ahead, without the workers."""
        workers = set(self.worker_pids())
        return [pid for pid in self.pids() if pid not in workers]

    def worker_pids(self) -> list[int]:
        """Return the pids of the workers and executors: they lead process groups. Of the other processes below the
        daemon, only its child and processes forked ahead do.
        """
        parents = parents_of_all()
        daemon, *below = self.pids() or [0]
        leading = (pid for pid in below if group_of(pid) == pid and parents.get(pid) != daemon)
        return [pid for pid in leading if not is_ahead(pid)]

    def wait_workers(self, function: str, count: int) -> None:
        """Wait until the function has this many workers."""
        until = time.monotonic() + PATIENCE_S
        while len(self.client.function(function)["workers"]) != count:
            if time.monotonic() > until:
                raise RuntimeError(f"{function} does not reach {count} workers")
            time.sleep(POLL_S)

    def wait_quiet(self) -> None:
        """Wait until no process of the node works, besides the daemon's periodic checks: a zygote compiles programs
        after a function's first wake.
        """
        self._wait_still(self.pids)

    def wait_prepared(self) -> None:
        """Wait until no zygote works. A daemon with hundreds of idle workers is hardly ever idle."""
        self._wait_still(lambda: self.own_pids()[1:])

    def _wait_still(self, pids: Callable[[], list[int]]) -> None:
        until = time.monotonic() + PATIENCE_S
        before: dict[int, int] = {}
        while True:
            ticks = {pid: cpu_ticks(pid) for pid in pids()}
            busy = [pid for pid in ticks if ticks[pid] > before.get(pid, -1) + self._idle_ticks(pid)]
            if ticks.keys() == before.keys() and not busy:
                return
            if time.monotonic() > until:
                names = ", ".join(map(_described, busy))
                raise RuntimeError(f"the processes of the node do not become idle: {names}")
            before = ticks
            time.sleep(QUIET_S)

    def _idle_ticks(self, pid: int) -> int:
        """Return the clock ticks that an idle process may use in QUIET_S."""
        return PERIODIC_TICKS if self.process is not None and pid == self.process.pid else 0


def _described(pid: int) -> str:
    """A process for a message: its number, and its name and arguments if it still exists."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return f"{pid} {command[:100]!r}"
    except OSError:
        return f"{pid}"


@contextmanager
def running_node(*options: str, python: str = sys.executable) -> Iterator[Node]:
    """A started node on an empty repository; all its files are removed afterwards."""
    with started(lambda root, host_store: Node(root / "data", host_store, options, python=python)) as node:
        yield node


@contextmanager
def started(make: Callable[[Path, Path], N]) -> Iterator[N]:
    """Start the node that `make` returns for a new directory and a new host store, which are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        host_store = tempfile.mkdtemp(prefix="overwinter-bench-", dir="/dev/shm")
        node = make(Path(root), Path(host_store))
        try:
            node.start()
            yield node
        finally:
            try:
                node.stop()
            finally:
                shutil.rmtree(host_store)


def forget_pages(directory: Path) -> None:
    """Drop the page cache of all files below a directory, so that the next read is from disk."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def parents_of_all() -> dict[int, int]:
    """Return every process that is not a zombie, with its parent."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The name of a process may be any bytes.
                state, parent = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(entry)] = int(parent)
    return parents


def is_ahead(pid: int) -> bool:
    """Whether a process was forked ahead and waits for a function."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes() == b"ow-ahead\n"
    except OSError:
        return False


def group_of(pid: int) -> int | None:
    """Return the process group of a process; None if it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None

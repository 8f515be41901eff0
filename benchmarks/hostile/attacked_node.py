"""The node under attack: starts it, watches its log and its processes, restarts it, and cleans up."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.hostile.exchange import HungError, ask, connect
from benchmarks.hostile.neighbour import Record
from benchmarks.hostile.verdicts import Tally, fatal_signal
from benchmarks.nodes import Node, parents_of_all

TRACEBACK = b"Traceback (most recent call last)"
PRINTED_BY_WORKERS = re.compile(rb"^worker \S+: ")
"""The beginning of log lines that workers printed."""
RAISED = re.compile(rb"^(zygote:)?[ |]*[A-Za-z_.]+(Error|Exception|Exit|Interrupt)\b")
LINES_BEFORE = 3
"""The lines of the log before a traceback that are shown with it."""
SHOWN_MAX = 200
"""The most lines of the tracebacks of one try that are shown."""
BASE_ZYGOTE_LOST = b"the base zygote is lost"
START_S = 90.0
FROZEN_S = 120.0
ENDS_S = 20.0
"""The longest time in which a node that no longer listens must end."""
LOG_BYTES_MAX = 64 << 20


class Tail:
    """The new lines of a growing file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._file = 0

    def lines(self) -> list[bytes]:
        """Return the new lines; all lines of a new file that replaced the old one."""
        try:
            with open(self.path, "rb") as file:
                number = os.fstat(file.fileno()).st_ino
                self._at = self._at if number == self._file else 0
                self._file = number
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        if self._at > LOG_BYTES_MAX:
            os.truncate(self.path, 0)
            self._at = 0
        return whole.splitlines()


class Journal:
    """Finds workers that died by a signal they caused, in the node's journal."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._functions: dict[int, str] = {}
        self._with_code: set[str] = set()

    def deaths(self) -> list[tuple[str, str]]:
        """Return the functions without a handler whose worker died so since the last call, with the node's message."""
        found = []
        for line in self._tail.lines():
            for step in _steps(line):
                function = self._functions.get(step.get("worker", -1), "")
                if step["type"] == "StartWorker":
                    self._functions[step["worker"]] = step["function"]
                elif step["type"] == "Deployed" and step["function"]["has_handler"]:
                    self._with_code.add(step["function"]["id"])
                elif step["type"] == "WorkerExited" and fatal_signal(step["reason"]):
                    # A handler may end its own worker.
                    found += [] if function in self._with_code else [(function, step["reason"])]
        return found


def _steps(line: bytes) -> list[dict]:
    try:
        _, event, actions = json.loads(line)[:3]
    except (ValueError, TypeError):
        return []
    return [event, *actions]


class Neighbour:
    """The process that calls all the time, and its output."""

    def __init__(self, port_file: Path, request: bytes, answer: bytes, root: Path) -> None:
        files = [root / "neighbour-request", root / "neighbour-answer"]
        for file, data in zip(files, (request, answer), strict=True):
            file.write_bytes(data)
        command = [sys.executable, "-m", "benchmarks.hostile.neighbour", str(port_file), *map(str, files)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.records: list[Record] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.records.append(Record(*json.loads(line)))

    def stop(self) -> None:
        """End it, and read the rest."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._listener.join(5)


class AttackedNode:
    """A node, the functions to deploy on it, and the tally of failures."""

    def __init__(self, root: Path, host_store: Path, tally: Tally, options: tuple[str, ...] = ()) -> None:
        self.root = root
        self.tally = tally
        journal = root / "journal"
        self.node = Node(root / "data", host_store, ("--journal", str(journal), *options), root / "log")
        self._log = Tail(root / "log")
        self._journal = Journal(journal)
        self.on_empty: list[Callable[[], None]] = []
        """Called after the node was started on empty data."""
        self.expects_death = False
        """Whether the daemon or the base zygote may end in the current try without counting as a crash."""
        self.restarts: list[tuple[float, float]] = []
        """The periods without a node, on the system's monotonic clock."""
        self.said: list[bytes] = []
        """The log lines that the last check read."""

    @property
    def port(self) -> int:
        """The port of the node."""
        return self.node.port

    def keep_port(self) -> None:
        """Use the same port after each restart, for clients that cannot read a new one."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.node.add_options("--port", str(free.getsockname()[1]))

    def start(self) -> None:
        """Start the node for the first time."""
        self.node.start()
        self._prepare()

    def _prepare(self) -> None:
        for step in self.on_empty:
            step()

    def examine(self) -> None:
        """Count the failures of the current try; restart the node if it has ended."""
        self._await_end()
        process = self.node.process
        if process is None or process.poll() is not None:
            status = None if process is None else process.returncode
            if not self.expects_death:
                self.tally.add("crashes", f"the daemon ended with status {status}: {self._last_errors()}")
            self._count_deaths()
            self.restart()
        self._count_deaths()
        self.said = self._log.lines()
        own = [line for line in self.said if not PRINTED_BY_WORKERS.match(line)]
        if any(TRACEBACK in line for line in own):
            self.tally.add("unforeseen_5xx", "a traceback in the log: " + _raised(own))
            kind, case, number = self.tally.here
            print(f"a traceback in the log, {kind}: {case} ({number}):", *tracebacks(own), sep="\n    ", flush=True)
        if not self.expects_death and any(BASE_ZYGOTE_LOST in line for line in own):
            self.tally.add("crashes", "the base zygote died")

    def _count_deaths(self) -> None:
        for function, reason in self._journal.deaths():
            self.tally.add("crashes", f"a worker of {function}: {reason}")

    def _last_errors(self) -> str:
        lines = (self.root / "log").read_bytes()[-2000:].splitlines() if (self.root / "log").exists() else []
        return _raised(lines) or _last_lines(lines)

    def answers(self) -> bool:
        """Whether the event loop answers within `FROZEN_S`; otherwise the node is killed, and `examine` restarts it."""
        try:
            reply = ask(self.port, "GET", "/v2/health/live", patience_s=FROZEN_S)
        except HungError:
            self.tally.add("hung", f"the node did not answer whether it is live within {FROZEN_S} s, and was killed")
            self.expects_death = True
            self.kill()
            return False
        except OSError:
            return False
        return reply is not None and reply.status == 200

    def _await_end(self) -> None:
        """Wait for the end of a node that no longer listens, and kill it after a while."""
        process = self.node.process
        if process is None or process.poll() is not None:
            return
        try:
            connect(self.port).close()
        except (ConnectionError, TimeoutError):
            # No other error says anything about the node.
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill the daemon, and its processes that do not end within seconds."""
        if self.node.process is not None:
            below = self.node.pids()[1:]
            self.node.process.kill()
            self.node.process.wait()
            until = time.monotonic() + 5.0
            while any(pid in parents_of_all() for pid in below) and time.monotonic() < until:
                time.sleep(0.01)
            for pid in below:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Restart the daemon; on empty data if it does not survive with the old data."""
        began = time.monotonic()
        with suppress(AttributeError):
            self.node.client.close()
        try:
            self._start()
            lives = self._still_runs()
        except (RuntimeError, OSError) as error:
            lives = False
            self.tally.add("crashes", f"the node does not start again: {error}; {self._last_errors()}")
        if not lives:
            self.kill()
            shutil.rmtree(self.node.data, ignore_errors=True)
            for left in self.node.host_store.iterdir():
                shutil.rmtree(left, ignore_errors=True)
            self._start()
            self._prepare()
        self.restarts.append((began, time.monotonic()))

    def _start(self) -> None:
        """Start the node as `Node.start`, but give up if it does not become ready."""
        timer = threading.Timer(START_S, self.kill)
        timer.start()
        try:
            self.node.start()
        finally:
            timer.cancel()

    def _still_runs(self) -> bool:
        """Whether the daemon still runs a moment later: it may end as soon as it reads its old data."""
        assert self.node.process is not None
        for _ in range(10):
            time.sleep(0.1)
            if self.node.process.poll() is not None:
                self.tally.add("crashes", f"the daemon ended again after a restart: {self._last_errors()}")
                return False
        return True

    def stop(self) -> None:
        """Stop the node in any state, and kill what remains of its processes."""
        pids = self.node.pids()
        try:
            if self.node.process is not None and self.node.process.poll() is None:
                self.node.stop()
        except subprocess.TimeoutExpired:
            self.tally.note("the node had to be killed in the end")
        finally:
            self.kill()
            for pid in pids[1:]:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def tracebacks(lines: list[bytes]) -> list[str]:
    """Return the log from the first traceback, with some lines before it, to the error of the last one."""
    begins = next((number for number, line in enumerate(lines) if TRACEBACK in line), len(lines))
    ends = max((number for number, line in enumerate(lines) if RAISED.match(line)), default=len(lines))
    shown = lines[max(0, begins - LINES_BEFORE) : ends + 1] if begins < len(lines) else []
    return [line.decode(errors="replace") for line in shown[:SHOWN_MAX]]


def _raised(lines: list[bytes]) -> str:
    """Return the errors at the ends of tracebacks, each once."""
    found = [line.decode(errors="replace").strip(" |") for line in lines if RAISED.match(line)]
    return "; ".join(dict.fromkeys(found))[:300]


def _last_lines(lines: list[bytes]) -> str:
    """Return the last lines of a log."""
    return b" | ".join(lines[-3:])[-300:].decode(errors="replace")


def interrupted(number: int, frame: object) -> None:
    """End the benchmark as Ctrl-C does, so that all processes are stopped."""
    raise KeyboardInterrupt


@contextmanager
def attacked_node(tally: Tally, *options: str) -> Iterator[AttackedNode]:
    """Create a node to attack, not yet started; remove everything afterwards."""
    before = signal.signal(signal.SIGTERM, interrupted)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-", ignore_cleanup_errors=True) as root:
        host_store = tempfile.mkdtemp(prefix="overwinter-bench-", dir="/dev/shm")
        found = AttackedNode(Path(root), Path(host_store), tally, options)
        try:
            yield found
        finally:
            # A second Ctrl-C would leave processes behind.
            on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                found.stop()
            finally:
                shutil.rmtree(host_store, ignore_errors=True)
                signal.signal(signal.SIGTERM, before)
                signal.signal(signal.SIGINT, on_interrupt)

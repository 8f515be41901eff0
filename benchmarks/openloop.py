"""An open-loop load generator in its own process: it sends requests at planned times, even while earlier ones are
unanswered.

`python -m benchmarks.openloop PORT PLAN OUTCOMES` sends the requests of one file and writes their outcomes to another;
SIGTERM ends it early. Latency counts from the planned time, so that a node that stalls is charged for all requests of
that time. A request is sent again, over a new connection, only if its connection was open before and closed at once
without a byte of an answer, as HTTP clients do. The generator is small because it shares the machine with the node.
"""

import gc
import hashlib
import json
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.wire import END, Answer

CHUNK_BYTES = 1 << 20
CHECK_INTERVAL_S = 0.05
DELAY_MAX_S = 30.0
"""The tolerance for delays of the generator itself."""
IDLE_MAX_S = 30.0
"""A connection unused for this long is not used again, because the node may be about to close it."""
CROSSED_MAX_S = 1.0
"""A reused connection that closes this soon after the request, without a byte of an answer, is assumed to have been
closed before the node read the request.
"""


class Target(msgspec.Struct, frozen=True):
    """A function: the request without its payload, and the SHA-256 of the correct tensors."""

    head: bytes
    payload: int
    """The index of the payload in the plan."""
    digest: bytes
    keep: bool = False
    """Whether its answers are kept in full, for comparisons within a tolerance."""


class Plan(msgspec.Struct, frozen=True):
    """The requests and their times."""

    targets: list[Target]
    payloads: list[bytes]
    arrivals: list[tuple[float, int]]
    """Ascending: seconds from the start, and the index of the target."""
    patience_s: float
    """How long to wait for answers after the last request was sent."""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one request."""

    target: int
    planned_at_s: float
    """The planned time, in seconds from the start of the plan."""
    delay_s: float
    """The delay with which the generator sent it."""
    latency_s: float
    status: int
    """The HTTP status; 0 if no complete answer came."""
    start: str
    """The kind of start (warm, bound, host or disk), the text of a refusal, or why no answer came."""
    right: bool
    """Whether the tensors are correct."""
    digest: bytes = b""
    """The SHA-256 of the answered tensors, for targets with several correct answers."""
    tensors: bytes = b""
    """The tensors, if `Target.keep`."""

    @property
    def kind(self) -> Literal["answered", "refused", "lost"]:
        """The kind of outcome: a refusal is an error with a message; a wrong answer counts as lost."""
        if self.status == 200:
            return "answered" if self.right else "lost"
        return "refused" if self.status and self.start else "lost"


class OpenConnection:
    """One connection, and the answer that it waits for."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.target = 0
        self.planned_at = 0.0
        self.sent = 0.0
        self.used = 0.0
        """The time of its last answer; 0: it had none."""
        self._received = bytearray()

    @property
    def silent(self) -> bool:
        """Whether no byte of an answer came."""
        return not self._received

    def take(self) -> Answer | None:
        """Read the available bytes; return the answer once it is complete. Raise ConnectionError if it never
        will be.
        """
        part = self.socket.recv(CHUNK_BYTES)
        if not part:
            raise ConnectionError("the node closed the connection")
        self._received += part
        stop = self._received.find(END)
        if stop < 0:
            return None
        first, *lines = bytes(self._received[:stop]).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        begin = stop + len(END)
        if len(self._received) < begin + int(headers["content-length"]):
            return None
        answer = Answer(int(first.split()[1]), headers, bytes(self._received[begin:]))
        self._received.clear()
        return answer


def outcome(connection: OpenConnection, began: float, answer: Answer | str, target: Target) -> Outcome:
    """Return the outcome of the request that has just ended, with an answer or without."""
    latency = time.perf_counter() - connection.planned_at
    at, delay = connection.planned_at - began, connection.sent - connection.planned_at
    if isinstance(answer, str):
        return Outcome(connection.target, at, delay, latency, 0, answer, False)
    if answer.status == 200:
        tensors = answer.tensors
        digest, kept = hashlib.sha256(tensors).digest(), tensors if target.keep else b""
        return Outcome(connection.target, at, delay, latency, 200, answer.start, digest == target.digest, digest, kept)
    try:
        said = str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        said = ""
    return Outcome(connection.target, at, delay, latency, answer.status, said, False)


def error_text(error: OSError) -> str:
    """Describe the error of a connection."""
    return f"{type(error).__name__}: {error}"


class Generator:
    """Carries out a plan against the node at a port."""

    def __init__(self, port: int, plan: Plan) -> None:
        self._port = port
        self._plan = plan
        self._poll = select.epoll()
        self._waiting: dict[int, OpenConnection] = {}
        self._free: list[OpenConnection] = []
        self._outcomes: list[Outcome] = []
        self._stopped = False
        self._began = 0.0
        self._end_at = 0.0

    def stop(self) -> None:
        """Stop sending, and wait for the answers as at the plan's end. A handler of a signal may call it, so the list
        of the remaining requests does not change here.
        """
        self._stopped = True
        self._end_at = time.perf_counter() + self._plan.patience_s

    def run(self) -> list[Outcome]:
        """Send everything, wait for the answers, and return the outcome of each request."""
        rest = deque(self._plan.arrivals)
        self._began = time.perf_counter()
        while rest or self._waiting:
            now = time.perf_counter()
            # Read answers between two requests even if the generator is behind; otherwise it would open more and more
            # connections.
            if rest and self._began + rest[0][0] <= now:
                self._send(*rest.popleft())
            elif not rest and now >= self._end_at:
                break
            until = self._began + rest[0][0] if rest else self._end_at
            for fd, _ in self._poll.poll(max(0.0, until - time.perf_counter())):
                self._read_answer(self._waiting[fd])
            if self._stopped:
                rest.clear()
        for connection in self._waiting.values():
            self._end(connection, "no answer in time")
        for connection in (*self._waiting.values(), *self._free):
            connection.socket.close()
        self._poll.close()
        return self._outcomes

    def _send(self, at: float, number: int) -> None:
        now = time.perf_counter()
        while self._free and now - self._free[0].used > IDLE_MAX_S:
            self._free.pop(0).socket.close()
        self._send_over(self._free.pop() if self._free else None, at, number)

    def _send_over(self, connection: OpenConnection | None, at: float, number: int) -> None:
        """Send the request over this connection, or over a new one (None)."""
        now = time.perf_counter()
        try:
            connection = connection or OpenConnection(self._port)
        except OSError as error:
            planned_at = self._began + at
            delay, latency = now - planned_at, time.perf_counter() - planned_at
            outcome = Outcome(number, at, delay, latency, 0, error_text(error), False)
            self._outcomes.append(outcome)
            return
        target = self._plan.targets[number]
        connection.target, connection.planned_at, connection.sent = number, self._began + at, now
        self._end_at = now + self._plan.patience_s
        self._waiting[connection.socket.fileno()] = connection
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        try:
            connection.socket.sendall(target.head + self._plan.payloads[target.payload])
        except OSError:
            # The node may have answered although it stopped reading; otherwise reading fails too.
            self._read_answer(connection)

    def _read_answer(self, connection: OpenConnection) -> None:
        try:
            answer = connection.take()
        except OSError as error:
            self._drop(connection, error)
            return
        if answer is not None:
            del self._waiting[connection.socket.fileno()]
            self._poll.unregister(connection.socket.fileno())
            connection.used = time.perf_counter()
            self._end(connection, answer)
            if answer.headers.get("connection", "").lower() == "close":
                connection.socket.close()
            else:
                self._free.append(connection)

    def _drop(self, connection: OpenConnection, error: OSError) -> None:
        """Handle a broken connection: its request is lost, unless the close and the request crossed."""
        del self._waiting[connection.socket.fileno()]
        connection.socket.close()
        if connection.used and connection.silent and time.perf_counter() - connection.sent < CROSSED_MAX_S:
            self._send_over(None, connection.planned_at - self._began, connection.target)
        else:
            self._end(connection, error_text(error))

    def _end(self, connection: OpenConnection, answer: Answer | str) -> None:
        self._outcomes.append(outcome(connection, self._began, answer, self._plan.targets[connection.target]))


class Sender:
    """A generator in a separate process, which is killed on exit from the context; its files are in `root`."""

    def __init__(self, port: int, plan: Plan, root: Path) -> None:
        file, self._file = root / "plan", root / "outcomes"
        file.write_bytes(msgspec.msgpack.encode(plan))
        # The file may be left from an earlier run in the same directory.
        self._began.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.openloop", str(port), str(file), str(self._file)]
        self.process = subprocess.Popen(command)
        self._patience_s = plan.patience_s

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def _began(self) -> Path:
        return self._file.with_suffix(".began")

    def began(self) -> float:
        """Wait for the start of the plan; return its time on the system's monotonic clock."""
        while not (text := self._began.read_text() if self._began.exists() else ""):
            if self.process.poll() is not None:
                raise RuntimeError(f"the load generator ended with status {self.process.returncode}")
            time.sleep(CHECK_INTERVAL_S)
        return float(text)

    def stop(self) -> None:
        """End the plan early, and wait for the answers to the requests that were sent."""
        self.process.terminate()
        self.process.wait(self._patience_s + DELAY_MAX_S)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes once the plan is carried out."""
        if self.process.wait():
            raise RuntimeError(f"the load generator ended with status {self.process.returncode}")
        return msgspec.msgpack.decode(self._file.read_bytes(), type=list[Outcome])


def count_kinds(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count the answered, refused and lost requests."""
    counts = {"answered": 0, "refused": 0, "lost": 0}
    for each in outcomes:
        counts[each.kind] += 1
    return counts


def attainment(outcomes: Sequence[Outcome], slo_s: Sequence[float]) -> float:
    """Return the share of all requests that were answered within the SLO of their target; 1 if there was none."""
    met = sum(each.kind == "answered" and each.latency_s <= slo_s[each.target] for each in outcomes)
    return met / len(outcomes) if outcomes else 1.0


def main() -> None:
    port, plan, outcomes = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    read = msgspec.msgpack.decode(Path(plan).read_bytes(), type=Plan)
    gc.freeze()
    # On the system's monotonic clock, so that other events can be compared with a request's time.
    Path(outcomes).with_suffix(".began").write_text(str(time.perf_counter()))
    generator = Generator(int(port), read)
    signal.signal(signal.SIGTERM, lambda *_: generator.stop())
    Path(outcomes).write_bytes(msgspec.msgpack.encode(generator.run()))


if __name__ == "__main__":
    main()

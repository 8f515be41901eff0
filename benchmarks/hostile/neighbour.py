"""Measures the service of a well-behaved client while others attack a node: three kinds of requests, each every 10 ms.

`python -m benchmarks.hostile.neighbour PORT_FILE REQUEST ANSWER` asks whether the node is live, calls a function whose
answer is known, and sends to an echo process: the control, which shows the delays that the machine alone causes. Each
line of its output is a Record as JSON. Answers that are right and quick are only counted. It ends when its standard
input is closed.
"""

import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.hostile.exchange import END, Reply
from benchmarks.wire import get

EVERY_S = 0.01
REPORTED_FROM_S = 0.01
"""Faster answers are not reported one by one."""
GIVE_UP_S = 120.0
AGAIN_S = 0.1


class Record(NamedTuple):
    """A line of the output: one request and its outcome."""

    what: str
    """live, infer or control."""
    at: float
    """When it was sent, on the system's monotonic clock."""
    took: float
    """The seconds until the outcome."""
    outcome: str
    """right, wrong, down (no connection, or it broke), silent (timed out), an HTTP status, or at the end unanswered
    (still waiting) and asked (`said` is the number of requests).
    """
    said: str = ""


class RepeatedRequest:
    """One request, repeated over a connection that stays open."""

    def __init__(self, what: str, request: bytes, answer: bytes | None) -> None:
        self.what = what
        self._request = request
        self._answer = answer
        self._end: socket.socket | None = None
        self._received = bytearray()
        self.sent = 0.0
        self.due = 0.0
        self.waiting = False
        self.asked = 0

    def attach(self, end: socket.socket) -> None:
        """Use this connection from now on."""
        self._end = end

    def fileno(self) -> int:
        """The descriptor of its connection; -1 without one."""
        return -1 if self._end is None else self._end.fileno()

    def ask(self, port: int | None) -> Record | None:
        """Send it once more; return what went wrong."""
        self.sent = time.monotonic()
        self.asked += 1
        try:
            if self._end is None:
                self._end = socket.create_connection(("127.0.0.1", port or 1), 5)
                self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._end.sendall(self._request)
        except OSError as error:
            return self._broken(f"{type(error).__name__}: {error}")
        self.waiting = True
        return None

    def listen(self) -> Record | None:
        """Read the available bytes; None until the answer is complete."""
        assert self._end is not None
        try:
            part = self._end.recv(1 << 16)
        except OSError as error:
            return self._broken(f"{type(error).__name__}: {error}")
        if not part:
            return self._broken("the connection was closed")
        self._received += part
        outcome, said = self._outcome()
        if not outcome:
            return None
        self._received.clear()
        return self._over(outcome, said)

    def late(self, now: float) -> Record | None:
        """Return a timeout if it has waited too long."""
        if not self.waiting or now - self.sent < GIVE_UP_S:
            return None
        record = self._broken("no answer")
        return record._replace(outcome="silent")

    def _outcome(self) -> tuple[str, str]:
        if self._answer is None:
            return ("right", "") if len(self._received) >= len(self._request) else ("", "")
        stop = self._received.find(END)
        if stop < 0:
            return "", ""
        first, *lines = bytes(self._received[:stop]).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = bytes(self._received[stop + len(END) :])
        if len(body) < int(headers.get("content-length", 0)):
            return "", ""
        reply = Reply(int(first.split()[1]), headers, body)
        if reply.status != 200:
            return str(reply.status), reply.said
        return ("right", "") if reply.tensors == self._answer else ("wrong", reply.tensors[:64].hex())

    def _over(self, outcome: str, said: str = "") -> Record:
        now = time.monotonic()
        self.waiting = False
        self.due = max(self.sent + EVERY_S, now) if outcome != "down" else now + AGAIN_S
        return Record(self.what, self.sent, now - self.sent, outcome, said)

    def _broken(self, said: str) -> Record:
        if self._end is not None:
            self._end.close()
        self._end = None
        self._received.clear()
        return self._over("down", said)


def echo() -> socket.socket:
    """Return a connection to a process that echoes everything."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        while part := there.recv(1 << 16):
            there.sendall(part)
        os._exit(0)
    there.close()
    return here


def port_of(file: Path) -> int | None:
    """Return the current port of the node, if it is known."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def print_if_notable(record: Record | None) -> None:
    """Print a record of a slow or wrong answer."""
    if record is not None and (record.took >= REPORTED_FROM_S or record.outcome != "right"):
        print(json.dumps(record), flush=True)


def watch(port_file: Path, questions: list[RepeatedRequest]) -> None:
    """Send requests until the input ends."""
    while True:
        now = time.monotonic()
        for question in questions:
            print_if_notable(question.late(now))
            if not question.waiting and question.due <= now:
                print_if_notable(question.ask(port_of(port_file) if question.fileno() < 0 else None))
        heard = [question for question in questions if question.waiting]
        idle = [question.due for question in questions if not question.waiting]
        pause = min([*idle, now + 1.0]) - time.monotonic()
        ready, _, _ = select.select([0, *heard], [], [], max(0.0, pause))
        if 0 in ready and not os.read(0, 1 << 10):
            return
        for question in heard:
            if question in ready:
                print_if_notable(question.listen())


def main() -> None:
    port_file, request, answer = map(Path, sys.argv[1:])
    control = RepeatedRequest("control", b"." * 100, None)
    control.attach(echo())
    live = RepeatedRequest("live", get("/v2/health/live"), b"")
    infer = RepeatedRequest("infer", request.read_bytes(), answer.read_bytes())
    questions = [live, infer, control]
    watch(port_file, questions)
    now = time.monotonic()
    for question in questions:
        if question.waiting:
            print_if_notable(Record(question.what, question.sent, now - question.sent, "unanswered"))
        print(json.dumps(Record(question.what, now, 0.0, "asked", str(question.asked))), flush=True)


if __name__ == "__main__":
    main()

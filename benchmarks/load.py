"""A load generator in a process of its own, so lean that it measures the node and not itself.

`python -m benchmarks.load PORT CLIENTS SECONDS REQUEST ...` sends the bytes in the file REQUEST over CLIENTS
connections that stay open, each sending again as soon as its answer is there, and prints the latencies in microseconds
as JSON. With several files, each connection sends one of them; the files are assigned in turn.
"""

import gc
import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

END = b"\r\n\r\n"
LENGTH = b"\r\ncontent-length: "
OK = b"HTTP/1.1 200"
WARM_UP_S = 0.5
CHUNK_BYTES = 1 << 20


class Caller:
    """One client: its connection and the answer that it waits for."""

    def __init__(self, port: int, request: bytes) -> None:
        self._request = request
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.sent_at = 0.0

    def send(self) -> None:
        """Send the request once more."""
        self.sent_at = time.perf_counter()
        self.socket.sendall(self._request)

    def take(self) -> bool:
        """Read the available bytes; return whether the answer is complete. Raise RuntimeError if it is not a
        success.
        """
        part = self.socket.recv(CHUNK_BYTES)
        received = self.received + part if self.received else part
        stop = received.find(END)
        if stop >= 0:
            at = received.find(LENGTH, 0, stop) + len(LENGTH)
            end = received.find(b"\r", at)
            if len(received) == stop + len(END) + int(received[at:end]):
                if not received.startswith(OK):
                    raise RuntimeError(f"the node answered {received[:500]!r}")
                self.received = b""
                return True
        if not part:
            raise RuntimeError("the node closed the connection")
        self.received = received
        return False


def run(port: int, clients: int, seconds: float, requests: Sequence[bytes]) -> list[float]:
    """Return the latencies, in seconds, of the answers after the warm-up and within `seconds`."""
    made = [Caller(port, requests[number % len(requests)]) for number in range(clients)]
    callers = {caller.socket.fileno(): caller for caller in made}
    poll = select.epoll()
    for fd, caller in callers.items():
        poll.register(fd, select.EPOLLIN)
        caller.send()
    latencies: list[float] = []
    begin = time.perf_counter() + WARM_UP_S
    end = begin + seconds
    now = begin
    while now < end:
        for fd, _ in poll.poll():
            caller = callers[fd]
            if caller.take():
                now = time.perf_counter()
                if begin <= now < end:
                    latencies.append(now - caller.sent_at)
                caller.send()
    for caller in callers.values():
        caller.socket.close()
    return latencies


def main() -> None:
    port, clients, seconds, *paths = sys.argv[1:]
    gc.freeze()
    latencies = run(int(port), int(clients), float(seconds), [Path(path).read_bytes() for path in paths])
    print(json.dumps([round(latency * 1e6, 1) for latency in latencies]))


if __name__ == "__main__":
    main()

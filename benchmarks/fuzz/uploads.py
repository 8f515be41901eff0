"""Kind 2: random block uploads. Content that does not match its address must never be stored."""

import json
import socket
import time
from random import Random

from benchmarks.fuzz.kind import judged
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import Reply, ask, connect, exchange, receive, request
from overwinter.store.blocks import address_of

MIB = 1 << 20
DRIPPING = 12
"""More than the threads for the disk."""
MANY = 100
ADDRESSES_QUERIED = 200_000
HUGE = 1 << 40


def path_of(address: str) -> str:
    """Return the path of a block."""
    return f"/overwinter/v1/blocks/{address}"


def begun(address: str, nbytes: int, data: bytes) -> bytes:
    """Return an upload that announces more bytes than it sends."""
    return f"PUT {path_of(address)} HTTP/1.1\r\nhost: node\r\ncontent-length: {nbytes}\r\n\r\n".encode() + data


class Uploads:
    """Blocks that are wrong, slow, interrupted, many or huge."""

    name = "uploads"
    cases = ("right", "wrong bytes", "broken off", "dripping", "huge", "many", "questions", "odd addresses", "chunked")

    def __init__(self, attacked: AttackedNode) -> None:
        self._attacked = attacked

    def prepare(self) -> None:
        """Do nothing: uploads need no function."""

    def run(self, case: str, rng: Random) -> None:
        getattr(self, "_" + case.replace(" ", "_"))(rng)

    def _put(self, address: str, data: bytes, headers: str = "") -> Reply | None:
        return judged(self._attacked, exchange(self._attacked.port, request("PUT", path_of(address), data, headers)))

    def _missing(self, addresses: list[str]) -> set[str]:
        body = json.dumps({"addresses": addresses}).encode()
        reply = judged(self._attacked, ask(self._attacked.port, "POST", "/overwinter/v1/blocks/missing", body))
        return set(json.loads(reply.body)["missing"]) if reply is not None and reply.status == 200 else set(addresses)

    def _check_refused(self, address: str, reply: Reply | None) -> None:
        """Check that the block was neither accepted nor stored."""
        if reply is not None and reply.status in (200, 201):
            self._attacked.tally.add(
                "wrong", f"a block was stored under an address that is not its own: {reply.body!r}"
            )
        elif not self._missing([address]):
            self._attacked.tally.add("wrong", f"a refused block is not missing; the answer was {reply}")

    def _right(self, rng: Random) -> None:
        data = rng.randbytes(rng.choice((0, 1, 4096, MIB)))
        reply = self._put(address_of(data), data)
        if reply is None or reply.status not in (200, 201, 503, 507):
            self._attacked.tally.add("wrong", f"a right block was refused: {reply}")

    def _wrong_bytes(self, rng: Random) -> None:
        data = rng.randbytes(rng.choice((0, 1, 4096, MIB)))
        # No other case has sent bytes of this length.
        address = address_of(data + rng.randbytes(16))
        self._check_refused(address, self._put(address, data))

    def _broken_off(self, rng: Random) -> None:
        # None is so small that another case could have sent the same bytes.
        data = rng.randbytes(rng.choice((16, 4096, 4 * MIB)))
        with connect(self._attacked.port) as end:
            end.sendall(begun(address_of(data), len(data), data[:-1]))
            time.sleep(rng.choice((0.0, 0.05)))
        self._check_refused(address_of(data), None)

    def _dripping(self, rng: Random) -> None:
        """Send a fast upload during slow ones; it must be answered."""
        ends: list[socket.socket] = []
        data = rng.randbytes(4096)
        try:
            for _ in range(DRIPPING):
                ends.append(connect(self._attacked.port))
                ends[-1].sendall(begun(address_of(rng.randbytes(32)), MIB, b"."))
            for _ in range(10):
                time.sleep(0.05)
                for end in ends:
                    end.sendall(b".")
            self._put(address_of(data), data)
        finally:
            for end in ends:
                end.close()

    def _huge(self, rng: Random) -> None:
        address = address_of(rng.randbytes(32))
        with connect(self._attacked.port) as end:
            end.sendall(begun(address, HUGE, bytes(MIB)))
            reply = judged(self._attacked, receive(end))
        self._check_refused(address, reply)

    def _many(self, rng: Random) -> None:
        """Send small blocks at once, over separate connections."""
        blocks = [rng.randbytes(100) for _ in range(MANY)]
        ends = [connect(self._attacked.port) for _ in blocks]
        try:
            for end, data in zip(ends, blocks, strict=True):
                end.sendall(request("PUT", path_of(address_of(data)), data))
            for end in ends:
                judged(self._attacked, receive(end))
        finally:
            for end in ends:
                end.close()

    def _questions(self, rng: Random) -> None:
        """Query very many addresses."""
        some = [f"{rng.randrange(1 << 200):064x}" for _ in range(100)]
        self._missing(some * (ADDRESSES_QUERIED // len(some)))

    def _odd_addresses(self, rng: Random) -> None:
        address = rng.choice(
            ("a" * 63, "A" * 64, "../" * 20, "%2e%2e%2f" * 9, "g" * 64, "a" * 64 + "%0a", "", "é" * 64)
        )
        reply = self._put(address, b"data")
        if reply is not None and reply.status in (200, 201):
            self._attacked.tally.add("wrong", f"a block was stored as {address!r}")

    def _chunked(self, rng: Random) -> None:
        """Send chunks of which the last never comes, or the first has a false length."""
        data = rng.randbytes(4096)
        head = f"PUT {path_of(address_of(data))} HTTP/1.1\r\nhost: node\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        size = rng.choice((b"1000", b"1001", b"fff", b"ffffffffff", b"-1", b""))
        with connect(self._attacked.port) as end:
            end.sendall(head + size + b"\r\n" + data + b"\r\n")
        self._missing([address_of(data)])

"""Which bodies are accepted, how they are decoded, and that their memory is reserved while they exist."""

import asyncio
import gzip
import zlib
from collections import deque
from collections.abc import Iterable
from itertools import islice

import pytest
from starlette.types import Message

from overwinter.api.budget import Budget, Reservation
from overwinter.api.reading import (
    COMPRESSED_STEP_BYTES,
    RATIO_FREE_BYTES,
    RATIO_MAX,
    WASTE_FREE_BYTES,
    BodyLimits,
    inflate,
    read_body,
)
from overwinter.api.steps import STEP_BYTES, StepRunner, finish
from overwinter.core.errors import CallerError, OverloadedError, TooLargeError

MIB = 1 << 20


def held(budget_bytes: int = 1 << 30) -> Reservation:
    return Reservation(Budget(budget_bytes, 1.0, 0.01), "caller")


def read(chunks: Iterable[bytes], reservation: Reservation, bounds: BodyLimits) -> bytes:
    left = [*chunks]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def work() -> bytes:
        return bytes(await read_body(receive, {}, reservation, StepRunner(), bounds))

    return asyncio.run(work())


def test_memory_is_reserved_for_a_body_of_unknown_length_that_arrives_in_one_piece() -> None:
    reservation = held(4 * MIB)
    assert len(read([bytes(60_000)], reservation, BodyLimits(8 * MIB, cost=8))) == 60_000
    assert reservation.nbytes == 8 * 60_000
    Reservation(reservation._budget, "another").grow(2 * MIB)
    with pytest.raises(OverloadedError):
        read([bytes(250_000)], Reservation(reservation._budget, "third"), BodyLimits(8 * MIB, cost=8))


def test_memory_is_reserved_for_a_body_of_unknown_length_as_it_grows() -> None:
    reservation = held(4 * MIB)
    assert len(read([bytes(MIB)] * 3, reservation, BodyLimits(8 * MIB))) == 3 * MIB
    assert 3 * MIB <= reservation.nbytes <= 4 * MIB
    with pytest.raises((OverloadedError, TooLargeError)):
        read([bytes(MIB)] * 6, held(4 * MIB), BodyLimits(8 * MIB))
    with pytest.raises(TooLargeError, match=str(2 * MIB)):
        read([bytes(MIB)] * 3, held(), BodyLimits(2 * MIB))


def test_a_body_of_empty_deflate_blocks_is_refused_before_its_end() -> None:
    stream = zlib.compressobj(0, zlib.DEFLATED, -zlib.MAX_WBITS)
    empty = stream.flush(zlib.Z_FULL_FLUSH)
    body = b"\x78\x9c" + empty * (2 * MIB // len(empty))
    steps = inflate(body, b"deflate", held(), BodyLimits(64 * MIB))
    with pytest.raises(CallerError, match="become 0"):
        deque(islice(steps, 2 * WASTE_FREE_BYTES // COMPRESSED_STEP_BYTES), 0)


def test_a_compressed_body_that_was_flushed_often_is_accepted() -> None:
    lines = [b"%d\n" % number for number in range(1 << 20, (1 << 20) + 40_000)]
    stream = zlib.compressobj(0)
    body = b"".join(stream.compress(line) + stream.flush(zlib.Z_SYNC_FLUSH) for line in lines) + stream.flush()
    assert len(body) > sum(map(len, lines)) + WASTE_FREE_BYTES
    assert finish(inflate(body, b"deflate", held(), BodyLimits(64 * MIB))) == b"".join(lines)


@pytest.mark.parametrize("press", [gzip.compress, zlib.compress])
def test_a_long_body_is_decompressed_in_steps_and_its_memory_is_reserved(press: object) -> None:
    plain = bytes(range(256)) * (3 * MIB // 256)
    coding = b"gzip" if press is gzip.compress else b"deflate"
    reservation = held()
    count = 0
    for _ in inflate(press(plain), coding, reservation, BodyLimits(4 * MIB, 2)):
        count += 1
    assert count >= len(plain) // STEP_BYTES - 1
    assert reservation.nbytes >= 2 * len(plain)
    assert finish(inflate(press(plain), coding, held(), BodyLimits(4 * MIB))) == plain


def test_a_body_that_swells_is_cut_off_early() -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    reservation = held()
    with pytest.raises(TooLargeError, match="send it uncompressed"):
        finish(inflate(bomb, b"gzip", reservation, BodyLimits(1 << 30)))
    assert reservation.nbytes <= max(RATIO_FREE_BYTES, RATIO_MAX * len(bomb)) + MIB
    with pytest.raises(OverloadedError):
        # The decompressed size is not announced, so the request cannot wait for memory.
        finish(inflate(gzip.compress(bytes(3 * MIB)), b"gzip", _beside(3 * MIB), BodyLimits(1 << 30)))


def _beside(other: int) -> Reservation:
    budget = Budget(4 * MIB, 1.0, 60.0)
    Reservation(budget, "other").take(other)
    return Reservation(budget, "caller")


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:100] + b"x" + b[101:], lambda b: b""]
)
def test_a_damaged_compressed_body_is_refused(change: object) -> None:
    pressed = gzip.compress(b"".join(b"%d" % n for n in range(100_000)))
    with pytest.raises(CallerError, match="gzip"):
        finish(inflate(change(pressed), b"gzip", held(), BodyLimits(64 * MIB)))

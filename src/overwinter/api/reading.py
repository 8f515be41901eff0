"""Reads and decompresses the body of a request within its limits.

The announced length is reserved from the budget before the body is read. A body that arrives in several messages, or
is decompressed, has its own memory pages: nothing is copied at the end, and the pages are returned to the system at
once.
"""

import mmap
import zlib
from collections.abc import Iterator, Mapping

import msgspec
from starlette.types import Message, Receive

from overwinter.api.budget import SMALL_BYTES, Reservation
from overwinter.api.steps import STEP_BYTES, StepRunner, Steps
from overwinter.core.errors import CallerError, MediaError, TooLargeError
from overwinter.core.tensor import Buffer

WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
"""zlib's parameter for the format of each content coding."""
RATIO_MAX = 100
RATIO_FREE_BYTES = 4 << 20
"""The size to which any body may be decompressed. Above it, a body may grow to RATIO_MAX times its compressed size."""
WASTE_FREE_BYTES = 64 << 10
WASTE_MAX = 4
"""The most compressed bytes per decompressed byte, beyond the first WASTE_FREE_BYTES: a stream of empty deflate blocks
could be endless.
"""
COMPRESSED_STEP_BYTES = 8 << 10
"""The compressed bytes of one step. Empty deflate blocks take a hundred times as long as others."""
GROWTH_BYTES = 1 << 20
"""The increments in which memory is reserved for a body without an announced length, and for a decompressed one. They
are smaller while the body is small.
"""
HEADROOM_BYTES = 64
"""The unused bytes before the body in its pages: `as_element` writes the length there, and the body remains aligned."""
ELEMENT_LENGTH_BYTES = 4
"""The bytes of the length before each element of a BYTES tensor."""

Fields = Mapping[bytes, bytes]
"""The headers of a request, by lower-case name."""


class _Pages(mmap.mmap):
    """The memory of a `Gathered`."""


class Gathered:
    """A buffer for at most `most` bytes, whose pages are allocated when they are written."""

    def __init__(self, most: int) -> None:
        self._bytes = memoryview(_Pages(-1, HEADROOM_BYTES + most))[HEADROOM_BYTES:]
        self.nbytes = 0

    def add(self, data: Buffer) -> None:
        """Append; the bytes must fit."""
        self._bytes[self.nbytes : self.nbytes + len(data)] = data
        self.nbytes += len(data)

    def view(self) -> memoryview:
        """The bytes so far."""
        return self._bytes[: self.nbytes].toreadonly()


def as_element(body: Buffer) -> Buffer:
    """Return a whole body as one element of BYTES, with its length before it; not copied if it has pages of its own."""
    length = len(body).to_bytes(ELEMENT_LENGTH_BYTES, "little")
    if not (isinstance(body, memoryview) and isinstance(body.obj, _Pages)):
        return b"".join((length, body))
    start = HEADROOM_BYTES - ELEMENT_LENGTH_BYTES
    element = memoryview(body.obj)[start : HEADROOM_BYTES + len(body)]
    element[:ELEMENT_LENGTH_BYTES] = length
    return element.toreadonly()


class BodyLimits(msgspec.Struct, frozen=True):
    """The limits of a body."""

    bytes_max: int
    """The most bytes, both as sent and decompressed."""
    cost: int = 1
    """The bytes of memory that are reserved for each byte of the body."""
    advice: str = ""
    """The end of the error's text."""

    def error(self) -> TooLargeError:
        """Return the error that names the limit and the remedy."""
        return TooLargeError(f"the request body is larger than this node accepts: {self.bytes_max} bytes{self.advice}")


async def read_body(
    receive: Receive, fields: Fields, reservation: Reservation, steps: StepRunner, limits: BodyLimits
) -> Buffer:
    """Read the whole body, decompressed. The memory for its announced length is reserved already.

    Raises TooLargeError when it exceeds its limit, compressed or decompressed, OverloadedError when there is no memory
    for it, MediaError for an unknown coding, and CallerError when it is invalid or the client has disconnected.
    """
    message = await receive()
    body: Buffer = body_of(message)
    if message.get("more_body"):
        body = await _gather(receive, body, reservation, limits)
    elif len(body) > limits.bytes_max:
        raise limits.error()
    elif (lacking := len(body) * limits.cost - reservation.nbytes) > 0:
        # Its length was not announced.
        reservation.grow(lacking)
    if (coding := fields.get(b"content-encoding")) is not None:
        return await steps.run(reservation.caller, inflate(body, coding, reservation, limits))
    return body


async def _gather(receive: Receive, first: Buffer, reservation: Reservation, limits: BodyLimits) -> Buffer:
    gathered = Gathered(limits.bytes_max)
    chunk: Buffer = first
    more = True
    while True:
        if gathered.nbytes + len(chunk) > limits.bytes_max:
            raise limits.error()
        lacking = (gathered.nbytes + len(chunk)) * limits.cost - reservation.nbytes
        if lacking > 0:
            reservation.grow(lacking if reservation.nbytes + lacking <= SMALL_BYTES else max(lacking, GROWTH_BYTES))
        gathered.add(chunk)
        if not more:
            return gathered.view()
        message = await receive()
        chunk = body_of(message)
        more = message.get("more_body", False)


def body_of(message: Message) -> bytes:
    """Return the bytes of one ASGI message; raise CallerError when the client has disconnected."""
    if message["type"] == "http.disconnect":
        raise CallerError("the client closed the connection before its request was complete")
    body: bytes = message.get("body", b"")
    return body


def announced_length(fields: Fields, limits: BodyLimits) -> int:
    """Return the announced length, or 0; raise TooLargeError when it exceeds the limit, before a byte is read."""
    length = int(fields.get(b"content-length", b"0"))
    if length > limits.bytes_max:
        raise limits.error()
    return length


def inflate(body: Buffer, coding: bytes, reservation: Reservation, limits: BodyLimits) -> Steps[Buffer]:
    """Decompress gzip or deflate in steps, to at most `limits.bytes_max`, and to at most RATIO_FREE_BYTES or RATIO_MAX
    times the compressed bytes, whichever is more.
    """
    coding = coding.strip().lower()
    if coding == b"identity":
        return body
    bits = WINDOW_BITS.get(coding)
    if bits is None:
        name = coding.decode("latin-1")
        raise MediaError(f"content-encoding {name!r} is not supported; supported: gzip, deflate, identity")
    most = max(RATIO_FREE_BYTES, RATIO_MAX * len(body))
    if most < limits.bytes_max:
        limits = BodyLimits(most, limits.cost, f" out of {len(body)} compressed bytes: send it uncompressed")
    plain = Gathered(limits.bytes_max)
    held = 0
    try:
        for part in _inflated(body, bits):
            if plain.nbytes + len(part) > limits.bytes_max:
                raise limits.error()
            if plain.nbytes + len(part) > held:
                # Often the first part is the whole body.
                growth = max(len(part), min(GROWTH_BYTES, held))
                held += growth
                reservation.grow(growth * limits.cost)
            plain.add(part)
            # Much compressed data may decompress to little or nothing.
            if plain.nbytes > STEP_BYTES or len(body) > COMPRESSED_STEP_BYTES:
                yield
    except zlib.error as error:
        raise CallerError(f"the {coding.decode()} body is not valid: {error}") from error
    return plain.view()


def _inflated(body: Buffer, window_bits: int) -> Iterator[bytes]:
    """Yield the decompressed bytes, at most STEP_BYTES at a time.

    Also raises zlib.error when the body is truncated, has trailing data, or is mostly empty deflate blocks.
    """
    stream = zlib.decompressobj(wbits=window_bits)
    at = nbytes = 0
    while not stream.eof:
        given = stream.unconsumed_tail
        if not given:
            given = bytes(body[at : at + COMPRESSED_STEP_BYTES])
            at += len(given)
        part = stream.decompress(given, STEP_BYTES)
        nbytes += len(part)
        if at > WASTE_FREE_BYTES + WASTE_MAX * nbytes:
            raise zlib.error(f"{at} bytes of it become {nbytes}")
        if not (given or part):
            raise zlib.error("it is truncated")
        yield part
    if stream.unused_data or at < len(body):
        raise zlib.error("it has bytes after its end")

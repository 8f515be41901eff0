"""Lists thousands of items without blocking the loop or using unbounded memory.

Each listing runs in steps and reserves its memory from the budget for requests, because a thousand listings may be
in progress at once.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from overwinter.api.budget import Reservation
from overwinter.api.exchange import encode_json
from overwinter.api.steps import Steps

STEP_ITEMS = 8
"""The most items that are encoded in one step."""
STEP_BYTES = 8 << 10
"""A step ends with the item that exceeds this: a description may have 64 KiB, and be slow to encode."""

T = TypeVar("T")


def listed(things: Iterable[T], describe: Callable[[T], object], reservation: Reservation) -> Steps[bytes]:
    """Encode the results of `describe` for each item as a JSON list; raise TooLargeError, or
    OverloadedError if memory is lacking.
    """
    # The first step is empty, because many requests may run their first step in one iteration of the event loop.
    yield
    text = bytearray(b"[")
    count, end = 0, STEP_BYTES
    for thing in things:
        encoded = encode_json(describe(thing)) + b","
        reservation.grow(len(encoded))
        text += encoded
        count += 1
        if count == STEP_ITEMS or len(text) > end:
            yield
            count, end = 0, len(text) + STEP_BYTES
    text[max(1, len(text) - 1) :] = b"]"
    return bytes(text)

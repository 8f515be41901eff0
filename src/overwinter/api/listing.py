"""How are thousands of things listed without keeping the loop, or its memory, from others?

Each listing goes in steps and holds what it has of the memory for requests: a thousand at once are as many answers.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from overwinter.api.budget import Hold
from overwinter.api.exchange import encode_json
from overwinter.api.steps import Steps

STEP_COUNT = 8
"""Things that are told in one step."""

T = TypeVar("T")


def listed(things: Iterable[T], tell: Callable[[T], object], hold: Hold) -> Steps[bytes]:
    """What `tell` makes of each, as a JSON list. TooLargeError, OverloadedError when there is no memory for it."""
    # The first step is no work: many may take theirs in one turn of the loop.
    yield
    text = bytearray(b"[")
    for number, thing in enumerate(things):
        told = encode_json(tell(thing)) + b","
        hold.grow(len(told))
        text += told
        if number % STEP_COUNT == 0:
            yield
    text[max(1, len(text) - 1) :] = b"]"
    return bytes(text)

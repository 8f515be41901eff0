"""Finds the JSON numbers that are slow to read.

msgspec takes 6 to 20 µs for a number below about 1e-307 or above about 1e288, a hundred times as long as for others.
The standard library takes 0.4 µs for any number.
"""

import json
import re
from itertools import islice
from math import isfinite

import msgspec

from overwinter.core.errors import CallerError
from overwinter.core.tensor import Buffer

SLOW_MAX = 256
"""The most slow numbers in a document that is read in one step."""

# Two patterns, because the search for a fixed first letter is ten times faster.
_EXPONENTS = (re.compile(rb"e[+-]?[0-9]{3}"), re.compile(rb"E[+-]?[0-9]{3}"))
# The value of a key. A number with fewer than 100 digits and an exponent of at most two digits is not slow.
_SLOW_VALUE = re.compile(rb":[ \t\r\n]*+-?(?:[0-9.]{100}|[0-9.]++[eE][+-]?[0-9]{3})")


def has_exponents(text: bytes) -> bool:
    """Whether a text of numbers may have exponents. Such numbers may take twenty times as long as others."""
    return b"e" in text or b"E" in text


def is_slow(text: bytes) -> bool:
    """Whether a text of numbers may have slow ones with exponents."""
    return any(exponent.search(text) for exponent in _EXPONENTS)


def decode_slow(text: bytes) -> list[float]:
    """Decode a flat list of numbers by the standard library, as strictly as msgspec; raise DecodeError."""
    try:
        values = msgspec.convert(json.loads(text.decode("ascii")), list[float])
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error
    if not all(map(isfinite, values)):
        raise msgspec.DecodeError("Number out of range")
    return values


def check_floats(text: Buffer) -> None:
    """Raise CallerError when a document has too many slow numbers as the values of its keys."""
    if sum(1 for _ in islice(_SLOW_VALUE.finditer(text), SLOW_MAX + 1)) > SLOW_MAX:
        raise CallerError(
            f"more than {SLOW_MAX} numbers have exponents of three digits, or 100 digits: round them, tiny ones to 0"
        )

"""Turns valid data into nearly valid data, deterministically by a `random.Random`."""

import copy
import math
from contextlib import suppress
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 63, 64, 65, 255, 1000, 65537, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**31), -(2**63), -(2**63) - 1),
    *(5e-324, 1e-308, 1e-9, 0.1, 0.5, 1.5, 1e18, 1e38, 3.5e38, 1e308, -1e308, -0.0, math.inf, -math.inf, math.nan),
)
"""The limits of arithmetic: denormals, infinities, one beyond each width."""
TEXTS = (
    *("", " ", "a", "0", "-1", "NaN", "null", "\x00", "\n", "../../etc/passwd", "/", "%s%n", "a" * 300, "b" * 70_000),
    *("é", "\u202e", "\U0001f600", "FP32", "FP64", "BYTES", "INT64", "BOOL", "batch", "input:x", "f" * 64, "0" * 64),
)
LARGE = (32, 64, 256, 4096, 65_536, 86_400, 1_000_000, 1 << 20, 1 << 24, 86_400_000, 31_536_000)
"""Values that may be allowed but should have no large effect."""
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, [0] * 200, ["x"] * 40)
DEEP = (3, 40, 150)
"""The levels of lists in which something is wrapped; it must still be possible to copy and write it."""
ROUNDS_MAX = 4


def tree(value: Any, rng: Random) -> Any:
    """Return the value with a few parts replaced, doubled, removed, exchanged or wrapped."""
    mutant = copy.deepcopy(value)
    for _ in range(rng.randint(1, ROUNDS_MAX)):
        places = list(_places(mutant))
        if not places:
            return rng.choice((*NUMBERS, *TEXTS, *OTHERS))
        holder, key = rng.choice(places)
        change = rng.choice((_replace, _replace, _nudge, _drop, _double, _exchange, _wrap))
        # A change fails if the value is already too deep.
        with suppress(RecursionError):
            change(mutant, holder, key, rng)
    return mutant


def content(data: bytes, rng: Random) -> bytes:
    """Return the bytes with a few of them flipped, overwritten, cut, moved or repeated."""
    mutant = bytearray(data)
    for _ in range(rng.randint(1, ROUNDS_MAX)):
        if not mutant:
            return rng.randbytes(rng.randint(0, 64))
        at = rng.randrange(len(mutant))
        match rng.randrange(7):
            case 0:
                mutant[at] ^= 1 << rng.randrange(8)
            case 1:
                mutant[at] = rng.choice((0, 0x7F, 0x80, 0xFF, 0xC1, 0xDF, 0xDD, rng.randrange(256)))
            case 2:
                del mutant[at:]
            case 3:
                del mutant[at : at + rng.randint(1, 16)]
            case 4:
                mutant[at:at] = rng.randbytes(rng.randint(1, 16))
            case 5:
                mutant[at:at] = mutant[at : at + rng.randint(1, 256)] * rng.randint(1, 3)
            case _:
                word = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, rng.choice(("big", "little")))
                mutant[at : at + 8] = word[: max(1, len(mutant) - at)]
    return bytes(mutant)


def _places(value: Any) -> Any:
    """Yield every list or dict within, with each of its keys."""
    open_ = [value]
    while open_:
        holder = open_.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            open_.append(holder[key])


def _replace(_: Any, holder: Any, key: Any, rng: Random) -> None:
    old = holder[key]
    likely = NUMBERS if isinstance(old, int | float) else TEXTS if isinstance(old, str) else OTHERS
    holder[key] = copy.deepcopy(rng.choice(likely if rng.random() < 0.7 else (*NUMBERS, *TEXTS, *OTHERS)))


def _nudge(_: Any, holder: Any, key: Any, rng: Random) -> None:
    """Change a number by one, or to zero, its double or its negative, which is less obvious than an extreme value."""
    old = holder[key]
    if isinstance(old, bool) or not isinstance(old, int | float):
        _replace(_, holder, key, rng)
    elif isinstance(old, int) or math.isfinite(old):
        holder[key] = old + rng.choice((-1, 1, -old, old, -2 * old))


def _drop(_: Any, holder: Any, key: Any, rng: Random) -> None:
    del holder[key]


def _double(_: Any, holder: Any, key: Any, rng: Random) -> None:
    if isinstance(holder, dict):
        holder[f"{key}{rng.choice(('', '2', ' ', chr(0)))}" if isinstance(key, str) else key] = holder[key]
    else:
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 50)))]


def _exchange(root: Any, holder: Any, key: Any, rng: Random) -> None:
    other, place = rng.choice(list(_places(root)))
    holder[key] = copy.deepcopy(other[place])


def _wrap(_: Any, holder: Any, key: Any, rng: Random) -> None:
    value = holder[key]
    for _ in range(rng.choice(DEEP)):
        value = [value]
    holder[key] = value

"""Divides the consecutive parts of a program into slices, of which the largest has as few bytes as possible."""

from collections.abc import Iterable, Sequence

SLICES_MAX = 16
"""The most slices of a program. A request waits for a device for each."""


def balanced_starts(parts: Sequence[Iterable[tuple[str, int]]], count: int, most: int) -> list[int] | None:
    """Divide the parts into at most `count` ranges of consecutive parts so that the largest range has as few bytes as
    possible. Return the number of the first part of each range; None if that is impossible with at most `most` bytes in
    a range.

    Each part is given as its blocks with their bytes. A block that occurs several times in a range counts once.
    """
    sets = [dict(part) for part in parts]
    low, high, best = 0, most, _starts(sets, most)
    if best is None or len(best) > count:
        return None
    while low < high:
        middle = (low + high) // 2
        found = _starts(sets, middle)
        if found is None or len(found) > count:
            low = middle + 1
        else:
            high, best = middle, found
    return best


def _starts(parts: Sequence[dict[str, int]], most: int) -> list[int] | None:
    """Return the first part of each range, where each range has at most this many bytes and as many parts as possible;
    None if a single part has more bytes.
    """
    begins, held, nbytes = [0], dict[str, int](), 0
    for number, part in enumerate(parts):
        added = sum(size for block, size in part.items() if block not in held)
        if nbytes + added > most:
            added, nbytes, held = sum(part.values()), 0, {}
            if added > most:
                return None
            begins.append(number)
        held |= part
        nbytes += added
    return begins

"""Merges the arrivals of many functions into one stream."""

from collections.abc import Iterable, Iterator
from itertools import chain

from overwinter.core.ids import FunctionName

SORTED_S = 60.0
"""The arrivals are sorted in pieces of this duration."""

Arrival = tuple[float, FunctionName]


def by_time(streams: Iterable[Iterator[Arrival]]) -> Iterator[Arrival]:
    """Yield the arrivals of all streams in time order. Sorting minute by minute costs less than merging streams."""
    following = [(first, stream) for stream in streams if (first := next(stream, None)) is not None]
    while following:
        ends = min(at for (at, _), _ in following) + SORTED_S
        piece: list[Arrival] = []
        later: list[tuple[Arrival, Iterator[Arrival]]] = []
        for first, stream in following:
            next_arrival = _move(chain((first,), stream), ends, piece)
            if next_arrival is not None:
                later.append((next_arrival, stream))
        yield from sorted(piece)
        following = later


def _move(stream: Iterator[Arrival], ends: float, piece: list[Arrival]) -> Arrival | None:
    """Move the arrivals before `ends` to the piece; return the next arrival, or None if there is none."""
    for arrival in stream:
        if arrival[0] >= ends:
            return arrival
        piece.append(arrival)
    return None

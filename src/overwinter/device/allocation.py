"""The position of a block in an arena, and the interface of what assigns it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Extent(NamedTuple):
    """The position and the size of a block in an arena."""

    offset: int
    nbytes: int


class Move(NamedTuple):
    """Memory to copy within an arena."""

    source: int
    target: int
    nbytes: int


class Allocator(Protocol):
    """Allocates the memory of an arena to blocks."""

    nbytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes that no block takes."""
        ...

    def place(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the offsets of new blocks of one function; None, without placing any, if they do not all fit."""
        ...

    def free(self, offsets: Iterable[int]) -> None:
        """Forget the blocks at these offsets."""
        ...

    def consolidate(self, largest: int = 0) -> list[Move]:
        """Move some blocks, so that free memory becomes contiguous and a block of `largest` bytes may fit after some
        calls; 0: no particular size. The blocks have their new offsets at once, and the caller must then copy the
        memory, in the order of the returned moves. An empty list: no further step is possible.
        """
        ...

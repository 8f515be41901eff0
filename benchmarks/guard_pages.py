"""Places tensors between guard pages, which nothing may access.

An access to a guard page ends the process. A write beside a tensor that stays within its own pages is found by the
bytes that fill the rest of these pages.
"""

import ctypes
import mmap
from typing import NamedTuple, Self

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_PAGE = mmap.PAGESIZE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Place(NamedTuple):
    """The address and size of a tensor, and the pages around it."""

    address: int
    nbytes: int
    pages: int
    mapped_bytes: int
    """The bytes between the guard pages."""


class GuardedMemory:
    """The memory for the tensors of one call, freed together."""

    def __init__(self, byte: int, at_end: bool) -> None:
        """With `at_end`, the end of a tensor is at the guard page behind it; otherwise its start is at the one before
        it.
        """
        self._byte = byte
        self._at_end = at_end
        self._places: list[_Place] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            _libc.munmap(place.pages - _PAGE, place.mapped_bytes + 2 * _PAGE)

    def flat(self, content: torch.Tensor, *, writable: bool) -> torch.Tensor:
        """Copy a flat, non-empty tensor, read-only like a worker's weights unless it is `writable`."""
        nbytes = content.numel() * content.element_size()
        mapped_bytes = -(-nbytes // _PAGE) * _PAGE
        start = _libc.mmap(None, mapped_bytes + 2 * _PAGE, 0, _PRIVATE, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            raise MemoryError
        pages = start + _PAGE
        _libc.mprotect(pages, mapped_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(pages, self._byte, mapped_bytes)
        address = pages + (mapped_bytes - nbytes if self._at_end else 0)
        ctypes.memmove(address, content.data_ptr(), nbytes)
        if not writable:
            _libc.mprotect(pages, mapped_bytes, mmap.PROT_READ)
        self._places.append(_Place(address, nbytes, pages, mapped_bytes))
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=content.dtype)

    def is_whole(self) -> bool:
        """Whether the bytes around the tensors, within their pages, are unchanged."""
        return all(self._beside(place).count(self._byte) == place.mapped_bytes - place.nbytes for place in self._places)

    def _beside(self, place: _Place) -> bytes:
        start = place.pages if self._at_end else place.address + place.nbytes
        return ctypes.string_at(start, place.mapped_bytes - place.nbytes)

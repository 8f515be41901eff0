"""Removes blocks that no function needs.

A tenant may hold millions of blobs, and nobody can upload or deploy while blocks are removed. So candidates are found
without the lock. The lock is then taken for some of them at a time, and these are checked again.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from overwinter.core.errors import NotFoundError
from overwinter.core.ids import Address, FunctionName, TenantId
from overwinter.store.catalog import Catalog
from overwinter.store.holdings import Holdings
from overwinter.store.locking import Lock

AT_ONCE = 256
"""The most files that are removed while the lock is held once."""
T = TypeVar("T")


class Collected(msgspec.Struct, frozen=True):
    """The files and bytes that a collection removed."""

    files: int
    nbytes: int


class Need(NamedTuple):
    """The blobs that a version of a function needs, and its tenant."""

    tenant: TenantId
    addresses: tuple[Address, ...]


class Collector:
    """Removes the unneeded blocks of a repository. The caller runs one collection at a time."""

    def __init__(
        self,
        lock: Lock,
        catalog: Catalog,
        holdings: Holdings,
        blocks: Path,
        need: Callable[[FunctionName, int], Need],
    ) -> None:
        """`need` reads what a version needs; it raises NotFoundError if the version was removed."""
        self._lock = lock
        self._catalog = catalog
        self._holdings = holdings
        self._blocks = blocks
        self._need = need
        self._known: dict[tuple[FunctionName, int], Need] = {}
        """The needs of each version at the last collection; a version never changes."""

    def collect(self, old: float, only: Collection[Address] | None = None) -> Collected:
        """Remove blocks that no function needs and that were not renewed after `old`; with `only`, only these."""
        needed = self._needed()
        candidates = self._candidates(old, needed) if only is None else only
        removed = [nbytes for batch in _batches(candidates) for nbytes in self._remove(batch, needed, old)]
        # Delete the files first: the table may need the disk space that they free.
        for held in _batches(self._holdings.until(old, only)):
            unneeded = [(tenant, address) for tenant, address in held if address not in needed.get(tenant, ())]
            if unneeded:
                self._forget(unneeded, needed, old)
        return Collected(len(removed), sum(removed))

    def remove_old(self, folders: Sequence[Path], old: float) -> Collected:
        """Remove the files in these directories that were last written before `old`."""
        entries = (entry for folder in folders if folder.exists() for entry in os.scandir(folder))
        removed = _remove_files(Path(entry.path) for entry in entries if _is_older(entry, old))
        return Collected(len(removed), sum(removed))

    def _candidates(self, old: float, needed: dict[TenantId, set[Address]]) -> Iterator[Address]:
        kept = self._holdings.since(old).union(*needed.values())
        # Iterate instead of listing: a list of all entries would enlarge the heap for good.
        for folder in self._blocks.iterdir():
            for entry in os.scandir(folder):
                if entry.name not in kept:
                    yield Address(entry.name)

    def _remove(self, batch: list[Address], needed: dict[TenantId, set[Address]], old: float) -> list[int]:
        """Remove those of the blocks that are still unneeded, and return their bytes."""
        with self._lock.exclusive():
            self._add_new(needed)
            kept = self._holdings.renewed(batch, old)
            unneeded = [each for each in batch if each not in kept and not any(each in has for has in needed.values())]
            return _remove_files(self._blocks / each[:2] / each for each in unneeded)

    def _forget(self, held: list[tuple[TenantId, Address]], needed: dict[TenantId, set[Address]], old: float) -> None:
        with self._lock.exclusive():
            self._add_new(needed)
            self._holdings.forget([each for each in held if each[1] not in needed.get(each[0], ())], old)

    def _needed(self) -> dict[TenantId, set[Address]]:
        """Return what the versions of each tenant need. Each manifest is read only once: all of them may be hundreds of
        MiB.
        """
        before, self._known = self._known, {}
        needed: dict[TenantId, set[Address]] = {}
        for key in self._catalog.versions():
            self._add(key, needed, before.get(key))
        return needed

    def _add_new(self, needed: dict[TenantId, set[Address]]) -> None:
        """Add the needs of versions that were registered meanwhile."""
        for key in self._catalog.versions():
            if key not in self._known:
                self._add(key, needed)

    def _add(
        self, key: tuple[FunctionName, int], needed: dict[TenantId, set[Address]], known: Need | None = None
    ) -> None:
        # A version that is removed meanwhile needs nothing.
        with suppress(NotFoundError):
            need = self._known[key] = known or self._need(*key)
            needed.setdefault(need.tenant, set()).update(need.addresses)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, AT_ONCE)):
        yield batch


def _is_older(entry: os.DirEntry[str], time: float) -> bool:
    """Whether the file was last written at `time` or before; False if it is gone, because uploads remove their drafts
    meanwhile.
    """
    with suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_mtime <= time
    return False


def _remove_files(paths: Iterable[Path]) -> list[int]:
    """Remove those of the files that exist, and return their bytes."""
    removed = []
    for path in paths:
        with suppress(FileNotFoundError):
            nbytes = path.lstat().st_size
            path.unlink()
            removed.append(nbytes)
    return removed

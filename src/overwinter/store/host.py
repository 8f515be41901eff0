"""The blocks in the host's memory.

There is one file per block in a directory of a tmpfs that only this user can access. A block is copied from the
repository to a draft, hashed while it is copied, sealed read-only and renamed to its address: a reader never sees a
partial block. Readers get read-only file descriptors and map those; they need no access to the directory.

    absent ──load: claimed──▶ copying ──sealed──▶ resident ──drop──▶ dropped ──removed──▶ absent
                                  └──any error──▶ absent                  (open mappings keep their bytes)

A file was complete before it was renamed to its address, so at its start a node only removes drafts and unneeded
blocks, and compares sizes (`sweep`). Memory may change meanwhile: blocks of an earlier run of the node are `unverified`
until `verify` has hashed them, which must happen before descriptors are passed on. One process owns a host store; its
threads may use it concurrently.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from overwinter.core.errors import NoSpaceError, StoreError
from overwinter.core.ids import Address
from overwinter.store.blocks import check_address
from overwinter.store.disk import disk_errors, free_bytes, own_directory
from overwinter.store.mapping import HUGE_BYTES, collapse_pages
from overwinter.store.removal import Removals
from overwinter.store.repository import damaged
from overwinter.store.residency import Sized, distinct
from overwinter.store.sealing import Draft, read_chunks

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_READS = 2


class Source(Protocol):
    """The source of blocks for a host store."""

    def open(self, address: Address) -> int:
        """Open a descriptor from which all bytes of the block can be read; the caller closes it."""
        ...

    def set_aside(self, address: Address) -> bool:
        """Read again a block that did not match its hash; if it is damaged or gone, set it aside and return True."""
        ...


class VerificationCounts(msgspec.Struct):
    """The results of verifying blocks since the node started."""

    verified_bytes: int = 0
    """The bytes that were hashed again in memory."""
    damaged_memory: int = 0
    """The blocks in memory that no longer matched their address and were dropped."""
    damaged_disk: int = 0
    """The blocks that did not match their address when they were loaded from disk, and were set aside."""


WAIT_S = 0.1
"""The longest time between two calls of `pause` by a load that waits for another one, or for a removal."""


class Swept(msgspec.Struct, frozen=True):
    """The removed files and bytes of a sweep, and the number of blocks kept."""

    files: int
    nbytes: int
    kept: int


def page_bytes(nbytes: int) -> int:
    """The memory of a file of `nbytes` in a tmpfs: whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _at_once() -> None:
    """Do not pause."""


class HostStore:
    """Blocks in a directory of a tmpfs, in whole pages."""

    def __init__(
        self,
        root: Path,
        repository: Source,
        verification: VerificationCounts | None = None,
        removals: Removals | None = None,
        within: Path | None = None,
    ) -> None:
        """Start with nothing resident; `sweep` adds what an earlier owner left. `removals`: those of all stores on this
        tmpfs. `within`: the directory of the shared store, for a dedicated one. Raises StoreError if the directory is
        a link or belongs to another user.
        """
        self.verification = verification or VerificationCounts()
        self.root = own_directory(Path(root))
        self._within = within
        self._repository = repository
        self._resident: dict[Address, int] = {}
        self._claimed: dict[Address, int] = {}
        """The bytes of each block that are still to be copied."""
        self._collapsed: set[Address] = set()
        self._unverified: set[Address] = set()
        self._removals = removals or Removals()
        self._changed = self._removals.changed

    def holds(self, address: Address) -> bool:
        """Whether the whole block is resident."""
        return address in self._resident

    def resident(self) -> dict[Address, int]:
        """The resident blocks and their bytes."""
        with self._changed:
            return dict(self._resident)

    @property
    def occupied_bytes(self) -> int:
        """Memory of the resident blocks, in whole pages."""
        return sum(map(page_bytes, self.resident().values()))

    def load(self, blobs: Iterable[Sized], pause: Callable[[], None] = _at_once) -> int:
        """Make all `blobs` resident and return the bytes that this call added; waits until they are.

        `pause` is called after each chunk that this call copies, and while it waits. What it raises ends the call, as
        any error does. Raises NoSpaceError before anything is written when they cannot fit, or when the tmpfs fills up
        meanwhile; StoreError when a block is damaged or missing in the repository. After an error the copied blocks
        stay resident and accounted for, a partial copy is removed, and another load continues from there.
        """
        wanted = distinct(blobs)
        added = 0
        while True:
            mine, awaited = self._claim(wanted, pause)
            added += self._copy_claimed(mine, pause)
            if not awaited:
                return added
            # Another thread copies these. If it fails, the next round claims them and raises the error here.
            self._wait_until_ended(awaited, pause)

    def open(self, addresses: Iterable[Address]) -> list[int]:
        """Return read-only, close-on-exec descriptors of resident blocks, in order; the caller closes them.

        Raises StoreError when a block is not resident; when its size has changed, in which case it is dropped and can
        be loaded again; and when an earlier owner left it and it is not verified. If the file of one is gone, all of
        `addresses` whose files are gone are dropped, so that one load brings them all.
        """
        descriptors: list[int] = []
        wanted = tuple(addresses)
        with ExitStack() as undo:
            for address in wanted:
                if address in self._unverified:
                    raise StoreError(f"block {address} in {self.root} is not verified yet: try again")
                descriptor = self._open(address, wanted)
                undo.callback(os.close, descriptor)
                descriptors.append(descriptor)
                if os.fstat(descriptor).st_size != self._resident.get(address):
                    self.drop([address])
                    raise StoreError(f"block {address} in {self.root} was truncated or is not resident: load it again")
            undo.pop_all()
        return descriptors

    def collapse_pages(self, blobs: Iterable[Sized], pause: Callable[[], None] = _at_once) -> int:
        """Collapse the pages of resident blocks into huge pages where the kernel can; return the number of blocks for
        which it did. `pause` is called before each block, because this is slow.
        """
        collapsed = 0
        for address, nbytes in distinct(blobs).items():
            pause()
            with self._changed:
                if nbytes < HUGE_BYTES or address in self._collapsed or not self.holds(address):
                    continue
                # Now, because a drop meanwhile removes the mark, also if the block is loaded again before the end.
                self._collapsed.add(address)
            with suppress(FileNotFoundError), open(self._path(address), "rb") as file:
                collapsed += collapse_pages(file.fileno(), nbytes)
        return collapsed

    def drop(self, addresses: Iterable[Address]) -> int:
        """Remove blocks, if resident, and return their bytes; memory is free once the last mapping has ended. Takes
        0.15 s per GiB. Raises StoreError if a file cannot be removed, and never NoSpaceError, because `open` calls
        this and raises StoreError only.
        """
        wanted = tuple(addresses)
        freed = self.begin_drop(wanted)
        try:
            self._removals.remove(map(self._path, wanted))
        except OSError as error:
            raise StoreError(f"cannot drop blocks in {self.root}: {error.strerror or error}") from error
        return freed

    def begin_drop(self, addresses: Iterable[Address]) -> int:
        """Make blocks unavailable, if resident, and return their bytes. Their memory is free after `Removals.remove`
        and the end of the last mapping.
        """
        freed = 0
        with self._changed:
            for address in addresses:
                if address in self._resident:
                    nbytes = self._resident.pop(address)
                    self._removals.add(self._path(address), nbytes)
                    freed += nbytes
                    self._collapsed.discard(address)
                    self._unverified.discard(address)
        return freed

    def sweep(self, needed_blobs: Iterable[Sized]) -> Swept:
        """Keep those of these blocks that are present in full size, and remove all other files, except blocks that are
        being copied.
        """
        needed = distinct(needed_blobs)
        kept: dict[Address, int] = {}
        files = nbytes = 0
        with self._changed, disk_errors("sweep", self.root):
            self._make_directory()
            for entry in [entry for entry in os.scandir(self.root) if not entry.is_dir(follow_symlinks=False)]:
                size = entry.stat(follow_symlinks=False).st_size
                address = Address(entry.name)
                if self.root / address in self._removals:
                    continue
                if size == needed.get(address) and entry.is_file(follow_symlinks=False):
                    kept[address] = size
                elif entry.name.partition(".")[0] not in self._claimed:
                    os.unlink(entry.path)
                    files += 1
                    nbytes += size
            self._unverified = (self._unverified | (kept.keys() - self._resident.keys())) & kept.keys()
            self._resident = kept
        return Swept(files, nbytes, len(kept))

    @property
    def is_copying(self) -> bool:
        """Whether a block is being copied."""
        return bool(self._claimed)

    def unverified(self, addresses: Iterable[Address] | None = None) -> list[Address]:
        """Return those of `addresses`, or of all, that are resident and were not hashed by this owner."""
        if not self._unverified:
            return []
        with self._changed:
            looked = self._resident if addresses is None else addresses
            return [each for each in looked if each in self._unverified]

    def verify(self, address: Address, pause: Callable[[], None] = _at_once) -> bool:
        """Hash a resident block again. A block that does not match its address is dropped, and the result is False.

        `pause` is called after each chunk. Raises StoreError when the block is missing, or when it does not match and
        was dropped or replaced meanwhile.
        """
        hasher = blake3()
        with open(self._open(address, (address,)), "rb") as file, disk_errors(f"read block {address}", self.root):
            try:
                for chunk in read_chunks(file.fileno()):
                    hasher.update(chunk)
                    self.verification.verified_bytes += len(chunk)
                    pause()
            except OSError as error:
                # The kernel refuses to read a page whose memory has failed.
                if error.errno != errno.EIO:
                    raise
                hasher.reset()
            if hasher.hexdigest() == address:
                self._unverified.discard(address)
                return True
            self._drop_damaged(address, file.fileno())
        return False

    def _drop_damaged(self, address: Address, descriptor: int) -> None:
        """Drop a block with a wrong hash; raise StoreError if it was dropped or replaced meanwhile."""
        with self._changed:
            if not self._is_file_of(address, descriptor):
                raise StoreError(f"block {address} left the host store {self.root} while it was hashed")
            self.verification.damaged_memory += self.begin_drop([address]) > 0
        # Without the lock, because a thread that removes other files waits for it. If the file cannot be removed, a
        # load replaces it; the processes that use the block must end in any case.
        with suppress(OSError):
            self._removals.remove([self._path(address)])

    def _is_file_of(self, address: Address, descriptor: int) -> bool:
        """Whether the descriptor refers to the file at the address; also True if another process removed that file."""
        try:
            return os.path.samestat(os.stat(self._path(address)), os.fstat(descriptor))
        except FileNotFoundError:
            return address in self._resident

    def _path(self, address: Address) -> Path:
        return self.root / check_address(address)

    def _open(self, address: Address, wanted: Sequence[Address]) -> int:
        """Open a block; if its file is gone, drop those of the wanted blocks whose files are gone."""
        try:
            return os.open(f"{self.root}/{check_address(address)}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.drop([each for each in wanted if not self._path(each).exists()])
            raise StoreError(f"block {address} is not in the host store {self.root}: load it first") from None
        except OSError as error:
            raise StoreError(f"cannot open block {address} in {self.root}: {error.strerror}") from error

    def _claim(self, wanted: dict[Address, int], pause: Callable[[], None]) -> tuple[dict[Address, int], set[Address]]:
        """Split the blocks that are not resident into those that this thread copies and those that another one is
        copying or removing. Wait for removals if the tmpfs has no room until they end.
        """
        with self._changed:
            while True:
                absent = {address: nbytes for address, nbytes in wanted.items() if address not in self._resident}
                awaited = {address for address in absent if self._is_changing(address)}
                mine = {address: nbytes for address, nbytes in absent.items() if address not in awaited}
                if not mine or self._admit(mine):
                    self._claimed |= mine
                    return mine, awaited
                pause()
                self._changed.wait(WAIT_S)

    def _is_changing(self, address: Address) -> bool:
        return address in self._claimed or self._path(address) in self._removals

    def _wait_until_ended(self, awaited: set[Address], pause: Callable[[], None]) -> None:
        with self._changed:
            while any(map(self._is_changing, awaited)):
                pause()
                self._changed.wait(WAIT_S)

    def _admit(self, mine: dict[Address, int]) -> bool:
        """Whether the tmpfs has room now; raise NoSpaceError if it will not have room after the removals either."""
        needed = sum(map(page_bytes, mine.values()))
        claimed = sum(map(page_bytes, self._claimed.values()))
        free = free_bytes(self.root) - claimed
        leaving = sum(map(page_bytes, self._removals.sizes))
        if needed > free + leaving:
            raise NoSpaceError(
                f"the host store {self.root} has no room for {len(mine)} blocks of {needed} bytes in all: unload or "
                f"remove functions, or give the host store more",
                totals=f"{max(free + leaving, 0)} bytes on the tmpfs are free for them",
            )
        return needed <= free

    def _copy_claimed(self, mine: dict[Address, int], pause: Callable[[], None]) -> int:
        """Copy what this thread has claimed; the claims end in any case."""
        # A copied block may be dropped, and claimed by another thread, before this call ends.
        claimed = set(mine)
        try:
            for address, nbytes in mine.items():
                self._copy(address, nbytes, pause)
                with self._changed:
                    self._resident[address] = nbytes
                    del self._claimed[address]
                    claimed.remove(address)
        finally:
            with self._changed:
                for address in claimed:
                    del self._claimed[address]
                self._changed.notify_all()
        return sum(mine.values())

    def _copy(self, address: Address, nbytes: int, pause: Callable[[], None]) -> None:
        self._make_directory()
        for _ in range(MAX_READS):
            self._claimed[address] = nbytes
            with Draft(self.root, address) as draft:
                self._fill(draft, address, nbytes, pause)
                if draft.digest == address and draft.nbytes == nbytes:
                    draft.seal(self.root, durable=False)
                    return
            if self._repository.set_aside(address):
                self.verification.damaged_disk += 1
                raise damaged(address)
        raise StoreError(
            f"block {address} was read {MAX_READS} times with a wrong size or hash (expected: {nbytes} bytes), though "
            f"the repository finds it intact: the manifest gives a wrong size, or memory or disk are failing"
        )

    def _make_directory(self) -> None:
        """Create the directory again if somebody removed it with all blocks, as systemd may do when the user logs out
        (RemoveIPC).
        """
        for directory in filter(None, (self._within, self.root)):
            own_directory(directory)

    def _fill(self, draft: Draft, address: Address, nbytes: int, pause: Callable[[], None]) -> None:
        descriptor = self._repository.open(address)
        try:
            for chunk in read_chunks(descriptor):
                draft.write(chunk)
                if draft.nbytes > nbytes:
                    return
                # The tmpfs counts what was written as used.
                self._claimed[address] = nbytes - draft.nbytes
                pause()
        except OSError as error:
            if error.errno == errno.EIO and self._repository.set_aside(address):
                self.verification.damaged_disk += 1
                raise damaged(address) from error
            raise StoreError(f"cannot read block {address} from the repository: {error.strerror}") from error
        finally:
            os.close(descriptor)

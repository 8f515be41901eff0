"""Writes bytes to a sealed file.

    draft, a temporary name ──write──▶ hashed and written ──seal──▶ read-only, under its own address
                             any error or death on the way leaves no file under any address

The address of a block is the digest of its bytes. A file gets an address as its name only by a rename after its last
byte was written, and the digest was computed while writing. So a file under an address is always complete, even after a
crash, and two writers of one block replace each other's file with an equal one.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from blake3 import blake3

from overwinter.core.ids import Address
from overwinter.core.tensor import Buffer
from overwinter.store.disk import disk_errors

CHUNK_BYTES = 256 << 10
"""Small enough that the data is still in the cache when it is written after it was hashed."""


def read_chunks(descriptor: int) -> Iterator[memoryview]:
    """Yield the rest of a file in chunks; a chunk is valid until the next one is read."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := os.readv(descriptor, [buffer]):
        yield buffer[:count]


def digest_of(descriptor: int) -> Address:
    """The address of the rest of a file."""
    hasher = blake3()
    for chunk in read_chunks(descriptor):
        hasher.update(chunk)
    return Address(hasher.hexdigest())


def is_intact(descriptor: int, address: Address) -> bool:
    """Whether the rest of a file has this address. Some file systems report damaged bytes as EIO."""
    try:
        return digest_of(descriptor) == address
    except OSError as error:
        if error.errno == errno.EIO:
            return False
        raise


class Draft:
    """A file under a temporary name; leaving the `with` without `seal` removes it."""

    def __init__(self, directory: Path, address: Address) -> None:
        """`address`: the expected one, for the temporary name and errors. The caller compares it with `digest`."""
        self._directory = directory
        self._hasher = blake3()
        self._what = f"write block {address}"
        self.nbytes = 0
        with disk_errors(self._what, directory):
            self._descriptor, self._name = tempfile.mkstemp(prefix=f"{address}.", dir=directory)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        # Some file systems need space for a removal. A collection or a sweep removes the draft later, and the error
        # that ended the writing says more.
        with suppress(OSError):
            Path(self._name).unlink()

    @property
    def digest(self) -> Address:
        """The address of the bytes so far."""
        return Address(self._hasher.hexdigest())

    def write(self, data: Buffer) -> None:
        """Append some bytes; raise NoSpaceError or StoreError if that fails."""
        if not memoryview(data).nbytes:
            return
        view = memoryview(data).cast("B")
        with disk_errors(self._what, self._directory):
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                self._hasher.update(chunk)
                while chunk:
                    chunk = chunk[os.write(self._descriptor, chunk) :]
        self.nbytes += len(view)

    def sync(self) -> None:
        """Wait until the bytes would survive a power failure."""
        with disk_errors(self._what, self._directory):
            os.fsync(self._descriptor)

    def seal(self, directory: Path, *, durable: bool) -> None:
        """Make the file read-only and move it to its address in `directory`; `durable`: it survives a power failure
        there, if `sync` was called before.
        """
        with disk_errors(self._what, directory):
            os.fchmod(self._descriptor, 0o444)
            Path(self._name).rename(directory / self.digest)
            if durable:
                _sync_directory(directory)
        os.close(self._descriptor)
        self._descriptor = -1


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

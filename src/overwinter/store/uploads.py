"""Writes an upload into the repository in pieces, within its bounds."""

import os
from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import msgspec

from overwinter.core.errors import CallerError, NoSpaceError
from overwinter.core.ids import Address, TenantId
from overwinter.core.tensor import Buffer
from overwinter.store.disk import disk_bytes
from overwinter.store.holdings import limit_error
from overwinter.store.sealing import Draft

INODES_FREE_MIN = 1024


class DiskBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the disk space of deployers."""

    free_min_bytes: int = 0
    """The disk space that no deploy may use."""
    tenant_bytes: int | None = None
    """The most bytes that one tenant may hold, each file in whole pages; None: unlimited."""

    def within(self, tenant_bytes: int | None) -> Self:
        """Return these bounds, with a tenant's limit reduced to `tenant_bytes` if that is smaller. None: unchanged."""
        if tenant_bytes is None:
            return self
        most = tenant_bytes if self.tenant_bytes is None else min(tenant_bytes, self.tenant_bytes)
        return msgspec.structs.replace(self, tenant_bytes=most)

    def check_free(self, directory: Path, nbytes: int) -> None:
        """Raise NoSpaceError unless this many more bytes leave enough of the disk of `directory` free."""
        state = os.statvfs(directory)
        free = state.f_bavail * state.f_frsize
        # A filesystem that creates inodes on demand reports none.
        scarce = self.free_min_bytes and state.f_files and state.f_favail < INODES_FREE_MIN
        if scarce or (self.free_min_bytes and free - nbytes < self.free_min_bytes):
            raise NoSpaceError(
                f"the disk of {directory} has no room for this: remove functions, or enlarge it",
                totals=f"{free} bytes and {state.f_favail} files are free, {self.free_min_bytes} bytes must stay free",
            )


UNBOUNDED = DiskBounds()


class UploadTotals:
    """The disk space that all uploads of each tenant need in addition to its blobs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._added: Counter[TenantId] = Counter()

    def add(self, tenant: TenantId, nbytes: int, most: float = inf) -> bool:
        """Change the disk space of a tenant's uploads, unless it would exceed `most`; return whether it changed."""
        with self._lock:
            added = self._added[tenant] + nbytes
            if added > most:
                return False
            self._added[tenant] = added
            if not added:
                del self._added[tenant]
            return True


class UploadSpace:
    """Bounds the disk space of one upload, which counts together with the tenant's blobs and its other uploads."""

    def __init__(
        self, bounds: DiskBounds, directory: Path, tenant: TenantId, totals: UploadTotals, held: int, replaced: int
    ) -> None:
        """`held`: the bytes of the tenant's blobs at the start. `replaced`: those of the blob that this upload
        replaces.
        """
        self._bounds = bounds
        self._directory = directory
        self._tenant = tenant
        self._totals = totals
        self._held = held
        self._replaced = replaced
        self._nbytes = self._added = 0

    def grow_to(self, nbytes: int) -> None:
        """Let the draft grow to this size; raise NoSpaceError when the disk is full, or the tenant is at its limit."""
        self._bounds.check_free(self._directory, nbytes - self._nbytes)
        self._nbytes = nbytes
        if (most := self._bounds.tenant_bytes) is not None:
            added = max(disk_bytes(nbytes) - self._replaced, 0)
            # An upload that adds no bytes is accepted even above the limit: it may repair a damaged block.
            if added > self._added and not self._totals.add(self._tenant, added - self._added, most - self._held):
                raise limit_error(self._tenant, most)
            self._added = added

    def end(self) -> None:
        """Stop counting the upload: its draft has become a blob, or was removed."""
        self._totals.add(self._tenant, -self._added)
        self._added = 0


class Upload:
    """An upload into the repository; leaving the `with` without `commit` removes it."""

    def __init__(
        self, address: Address, draft: Draft, space: UploadSpace, admit: Callable[[Draft, float], bool]
    ) -> None:
        """Create the upload. `admit` moves the draft to its address."""
        self._address = address
        self._draft = draft
        self._space = space
        self._admit = admit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._draft.__exit__(kind, error, at)
        self._space.end()

    def write(self, chunk: Buffer) -> None:
        """Append some bytes; raise NoSpaceError when the disk is full, or the tenant is at its limit."""
        self._space.grow_to(self._draft.nbytes + memoryview(chunk).nbytes)
        self._draft.write(chunk)

    def commit(self, now: float) -> bool:
        """Move the blob to its address; return whether it was missing. Raises CallerError if it has another address, or
        NoSpaceError.
        """
        if self._draft.digest != self._address:
            raise CallerError(
                f"the {self._draft.nbytes} bytes sent for block {self._address} have the address "
                f"{self._draft.digest}: they were truncated or changed in transit; send them again"
            )
        # Without the repository's lock, because a large block takes seconds. Meanwhile it still counts as an upload.
        self._draft.sync()
        # From now on it counts as a blob.
        self._space.end()
        return self._admit(self._draft, now)

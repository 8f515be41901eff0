"""Writes an upload into the repository in pieces, within its bounds."""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from overwinter.core.errors import CallerError, NoSpaceError
from overwinter.core.ids import Address, TenantId
from overwinter.core.tensor import Buffer
from overwinter.store.holdings import disk_bytes, limit_error
from overwinter.store.sealing import Draft

INODES_FREE_MIN = 1024


class DiskBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the disk space of deployers."""

    free_min_bytes: int = 0
    """The disk space that no deploy may use."""
    tenant_bytes: int | None = None
    """The most bytes that one tenant may hold, each file in whole pages; None: unlimited."""

    def within(self, tenant_bytes: int | None) -> Self:
        """Return the same with a lower limit for a tenant; None: unchanged."""
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


class Upload:
    """An upload into the repository; leaving the `with` without `commit` removes it."""

    def __init__(
        self, address: Address, draft: Draft, check: Callable[[int], None], admit: Callable[[Draft, float], bool]
    ) -> None:
        """Create the upload. `check` is called with the size of the draft before it grows; `admit` moves it to its
        address.
        """
        self._address = address
        self._draft = draft
        self._check = check
        self._admit = admit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._draft.__exit__(kind, error, at)

    def write(self, chunk: Buffer) -> None:
        """Append some bytes; raise NoSpaceError when the disk is full, or the tenant is at its limit."""
        self._check(self._draft.nbytes + memoryview(chunk).nbytes)
        self._draft.write(chunk)

    def commit(self, now: float) -> bool:
        """Move the blob to its address, and return whether it is new; raise CallerError when it has another address."""
        if self._draft.digest != self._address:
            raise CallerError(
                f"the {self._draft.nbytes} bytes sent for block {self._address} have the address "
                f"{self._draft.digest}: they were truncated or changed in transit; send them again"
            )
        return self._admit(self._draft, now)


def checked_growth(bounds: DiskBounds, directory: Path, tenant: TenantId, taken: int) -> Callable[[int], None]:
    """Return the check before an upload grows to a size, for a tenant that has `taken` bytes; it raises
    NoSpaceError.
    """
    written = 0

    def check(nbytes: int) -> None:
        nonlocal written
        bounds.check_free(directory, nbytes - written)
        written = nbytes
        if bounds.tenant_bytes is not None and taken + disk_bytes(nbytes) > bounds.tenant_bytes:
            raise limit_error(tenant, bounds.tenant_bytes)

    return check

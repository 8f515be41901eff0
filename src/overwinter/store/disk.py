"""Space, directories, files and errors of the disk."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overwinter.core.errors import NoSpaceError, StoreError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The errors that count as a full disk."""
DISK_PAGE_BYTES = 4096
"""A file occupies whole pages of this size on a disk, at least one."""
OPEN_FLAGS = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""The flags for opening files of the data directory. Commands run by root may write such files; following a link there
would let the node's user redirect the write.
"""


@contextmanager
def disk_errors(action: str, directory: Path) -> Iterator[None]:
    """Turn OSErrors into NoSpaceError, naming the disk, or StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoSpaceError(
                f"cannot {action}: the disk of {directory} is full; remove functions, or enlarge it",
                totals=f"{free_bytes(directory)} bytes free, {error.strerror}",
            ) from error
        raise StoreError(f"cannot {action} in {directory}: {error.strerror or error}") from error


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the filesystem of `directory`, which may not exist yet."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    state = os.statvfs(existing)
    return state.f_bavail * state.f_frsize


def private_directory(path: Path) -> Path:
    """Return the directory `path`; if it does not exist, create it with access for this user only."""
    with disk_errors("make a directory", path):
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may create it at the same moment. An existing directory keeps its permissions.
            path.mkdir(mode=0o700, exist_ok=True)
    return path


def own_directory(path: Path) -> Path:
    """Return the directory `path`, to which only this user has access; create it if it does not exist. Raise StoreError
    if it is a link or another user's: any user may create it in a directory such as /dev/shm.
    """
    private_directory(path)
    with disk_errors("use a directory", path):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            if found.st_mode & 0o077:
                path.chmod(0o700)
            return path
    raise StoreError(f"{path} is a link or belongs to another user: remove it, or choose another --host-store")


def disk_bytes(nbytes: int) -> int:
    """The disk space of a file of `nbytes`."""
    return max(1, -(-nbytes // DISK_PAGE_BYTES)) * DISK_PAGE_BYTES


def give_to_owner(descriptor: int, directory: Path) -> None:
    """Give a file that root created to the owner of its directory: the node may run as another user."""
    if os.geteuid() == 0:
        owner = os.stat(directory)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)

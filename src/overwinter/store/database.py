"""Opens, reads and changes the node's SQLite files, also when the disk is full."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overwinter.core.errors import NoSpaceError, StoreError
from overwinter.store.disk import free_bytes

PRIMARY_CODE_MASK = 0xFF
INDEX_BYTES = 32 << 10
"""The size of one part of the index of a write-ahead log. A disk with less space causes an I/O error, not a disk-full
error.
"""
LOG_BYTES = 8 * INDEX_BYTES
"""The free disk space at which a database returns to its write-ahead log after it worked without one."""
LOGGED = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")
UNLOGGED = (
    # There is no space for the shared index of the log. Without it, one process at a time may use the file.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = MEMORY",
    "PRAGMA locking_mode = NORMAL",
    "PRAGMA synchronous = FULL",
)


class Database:
    """An SQLite file with a write-ahead log. Any thread and other processes may use it concurrently.

    If the disk has no space for the log when the file is opened, the file is changed in place until there is space, so
    that functions can be read and removed. A crash during such a change may damage it.
    """

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        """Open or create the file; raise StoreError if it is not an SQLite file, or NoSpaceError."""
        self.path = path
        self._lock = threading.Lock()
        with suppress(OSError):
            # Create the file before SQLite does, with access for this user only; SQLite gives its other files the
            # same permissions.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._is_logged = True
        try:
            self._db = self._opened(busy_timeout_s, LOGGED)
        except NoSpaceError:
            self._is_logged = False
            self._db = self._opened(busy_timeout_s, UNLOGGED)

    def _opened(self, busy_timeout_s: float, pragmas: tuple[str, ...]) -> sqlite3.Connection:
        with self.errors():
            db = sqlite3.connect(self.path, busy_timeout_s, isolation_level=None, check_same_thread=False)
            try:
                for pragma in pragmas:
                    db.execute(pragma)
            except BaseException:
                db.close()
                raise
        return db

    def _log_again(self) -> None:
        """Use a write-ahead log again, if there is space for it."""
        if not self._is_logged and free_bytes(self.path.parent) >= LOG_BYTES:
            with suppress(sqlite3.OperationalError):
                self._is_logged = self._db.execute(LOGGED[0]).fetchone() == ("wal",)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading; results must be read within the `with` statement."""
        with self._lock, self.errors():
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction: all changes are made or, after any error, none."""
        with self._lock, self.errors():
            self._log_again()
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn SQLite's errors into NoSpaceError or StoreError, which name the file."""
        try:
            yield
        except sqlite3.Error as error:
            free = free_bytes(self.path.parent)
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & PRIMARY_CODE_MASK
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free < INDEX_BYTES):
                raise NoSpaceError(
                    f"cannot write {self.path}: its disk is full; remove functions, or enlarge it",
                    totals=f"{free} bytes free",
                ) from error
            raise StoreError(f"cannot use {self.path}: {error}") from error

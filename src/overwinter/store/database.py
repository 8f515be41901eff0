"""Opens, reads and changes the node's sqlite files, also when the disk is full."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overwinter.core.errors import NoSpaceError, StoreError
from overwinter.store.sealing import free_bytes

PRIMARY_CODE_MASK = 0xFF
INDEX_BYTES = 32 << 10
"""One piece of the index of a write-ahead log; a disk with less room gives an I/O error in place of a full disk."""


LOG_BYTES = 8 * INDEX_BYTES
"""Room on the disk with which a file that is used without its log gets it back."""
LOGGED = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")
UNLOGGED = (
    # Without the index of a log, which has no room, its file can be read by one process alone.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = MEMORY",
    "PRAGMA locking_mode = NORMAL",
    "PRAGMA synchronous = FULL",
)


class Database:
    """One sqlite file with a write-ahead log; any thread may use it, and other processes beside it.

    Where the disk has no room for the log the file is changed in place until there is some: what was deployed can be
    read and removed. A crash amid such a change may damage it.
    """

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        """Open or make the file; StoreError when it is none of sqlite's, NoSpaceError."""
        self.path = path
        self._lock = threading.Lock()
        with suppress(OSError):
            # Made before sqlite would, for this user alone; sqlite gives its other files the same rights.
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
        """To ask; read all of an answer within."""
        with self._lock, self.errors():
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """To change; all of it or, after any error, nothing."""
        with self._lock, self.errors():
            self._log_again()
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn sqlite's errors into NoSpaceError or StoreError, which name the file."""
        try:
            yield
        except sqlite3.Error as error:
            free = free_bytes(self.path.parent)
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & PRIMARY_CODE_MASK
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free < INDEX_BYTES):
                raise NoSpaceError(
                    f"cannot write {self.path}: its disk is full; remove functions, or give it more room",
                    totals=f"{free} bytes free",
                ) from error
            raise StoreError(f"cannot use {self.path}: {error}") from error

"""How is one of the node's sqlite files opened, read and changed, also when its disk is full?"""

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


class Database:
    """One sqlite file with a write-ahead log; any thread may use it, and other processes beside it."""

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        """Open or make the file; StoreError when it is none of sqlite's, NoSpaceError."""
        self.path = path
        self._lock = threading.Lock()
        with self.errors():
            with suppress(OSError):
                # Made before sqlite would, for this user alone; sqlite gives its other files the same rights.
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, busy_timeout_s, isolation_level=None, check_same_thread=False)
        try:
            with self.errors():
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
        except BaseException:
            self._db.close()
            raise

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
        with self._lock, self.errors(), self._db:
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
                    f"cannot write {self.path}: its disk is full ({free} bytes free); remove functions, or give it "
                    f"more room"
                ) from error
            raise StoreError(f"cannot use {self.path}: {error}") from error

"""Which functions are deployed, and which node is this?

One sqlite file beside the blocks. A version number is taken in the transaction that adds the function and is never
given out again for that name, so that `name@3` means one thing for ever, even after its removal.
"""

import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from overwinter.core.errors import NoSpaceError, NotFoundError, StoreError
from overwinter.core.ids import FunctionName
from overwinter.store.sealing import free_bytes

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0
PRIMARY_CODE_MASK = 0xFF
INDEX_BYTES = 32 << 10
"""One piece of the index of a write-ahead log; a disk with less room gives an I/O error in place of a full disk."""
_SCHEMA = (
    "CREATE TABLE node (identity TEXT NOT NULL)",
    "CREATE TABLE names (name TEXT PRIMARY KEY, last_version INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE functions (name TEXT NOT NULL, version INTEGER NOT NULL, manifest BLOB NOT NULL,
                               created REAL NOT NULL, proven INTEGER NOT NULL, PRIMARY KEY (name, version))""",
)


class Row(NamedTuple):
    """One registered version, its manifest still encoded; `created` in seconds since 1970."""

    name: FunctionName
    version: int
    manifest: bytes
    created: float


@contextmanager
def _catalog_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        free = free_bytes(path.parent)
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & PRIMARY_CODE_MASK
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free < INDEX_BYTES):
            raise NoSpaceError(
                f"cannot write {path}: its disk is full ({free} bytes free); remove functions, or give it more room"
            ) from error
        raise StoreError(f"cannot use the catalog {path}: {error}") from error


class Catalog:
    """The repository's sqlite file; any thread may use it, and other processes beside it."""

    def __init__(self, path: Path) -> None:
        """Open or make the catalog at `path`; StoreError when it is damaged or of a newer kind."""
        self._path = path
        self._lock = threading.Lock()
        with _catalog_errors(path):
            with suppress(OSError):
                # Made before sqlite would, for this user alone; sqlite gives its other files the same rights.
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            self.node_identity = self._prepare()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(self, name: FunctionName, manifest: bytes, created: float, proven: bool = True) -> int:
        """Register a new version of `name` and return its number, 1 above the highest that the name ever had."""
        with self._transaction() as db:
            (version,) = db.execute(
                """INSERT INTO names VALUES (?, 1)
                   ON CONFLICT (name) DO UPDATE SET last_version = last_version + 1 RETURNING last_version""",
                (name,),
            ).fetchone()
            db.execute("INSERT INTO functions VALUES (?, ?, ?, ?, ?)", (name, version, manifest, created, proven))
        return int(version)

    def remove(self, name: FunctionName, version: int | None) -> tuple[int, ...]:
        """Forget one version, or all with None, and return their numbers; NotFoundError when there is none."""
        with self._transaction() as db:
            present = self._versions(name)
            gone = present if version is None else tuple(number for number in present if number == version)
            if not gone:
                raise self._not_found(name, version, present)
            db.executemany("DELETE FROM functions WHERE name = ? AND version = ?", [(name, number) for number in gone])
        return gone

    def prove(self, name: FunctionName, version: int) -> None:
        """The version has passed its trial; NotFoundError when it was removed meanwhile."""
        with self._transaction() as db:
            done = db.execute("UPDATE functions SET proven = 1 WHERE name = ? AND version = ?", (name, version))
            if not done.rowcount:
                raise self._not_found(name, version, self._versions(name))

    def forget_unproven(self) -> None:
        """Forget versions whose trial never ended."""
        with self._transaction() as db:
            db.execute("DELETE FROM functions WHERE NOT proven")

    def get(self, name: FunctionName, version: int | None) -> Row:
        """One version, or the newest with None; NotFoundError when there is none."""
        with self._lock, _catalog_errors(self._path):
            row = self._db.execute(
                """SELECT name, version, manifest, created FROM functions
                   WHERE name = ? AND version = coalesce(?, version) ORDER BY version DESC LIMIT 1""",
                (name, version),
            ).fetchone()
            if row is None:
                raise self._not_found(name, version, self._versions(name))
        return Row(*row)

    def rows(self, unproven: bool = False) -> list[Row]:
        """All versions that have passed their trial, or with `unproven` all, by name and number."""
        with self._lock, _catalog_errors(self._path):
            found = self._db.execute(
                """SELECT name, version, manifest, created FROM functions WHERE proven OR ?
                   ORDER BY name, version""",
                (unproven,),
            )
            return [Row(*row) for row in found]

    def _versions(self, name: FunctionName) -> tuple[int, ...]:
        found = self._db.execute("SELECT version FROM functions WHERE name = ? ORDER BY version", (name,))
        return tuple(number for (number,) in found)

    def _not_found(self, name: FunctionName, version: int | None, present: tuple[int, ...]) -> NotFoundError:
        if not present:
            return NotFoundError(f"no function {name!r} is deployed")
        return NotFoundError(f"function {name!r} has no version {version}; it has {', '.join(map(str, present))}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _catalog_errors(self._path), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db

    def _prepare(self) -> str:
        with _catalog_errors(self._path):
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction() as db:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found > SCHEMA_VERSION:
                raise StoreError(
                    f"{self._path} has schema {found}, this Overwinter knows {SCHEMA_VERSION}: "
                    f"use a newer Overwinter, or another directory"
                )
            if not found:
                for statement in _SCHEMA:
                    db.execute(statement)
                db.execute("INSERT INTO node VALUES (?)", (str(uuid.uuid4()),))
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (identity,) = db.execute("SELECT identity FROM node").fetchone()
        return str(identity)

"""Which functions are deployed, and which node is this?

One sqlite file beside the blocks. A version number is taken in the transaction that adds the function and is never
given out again for that name, so that `name@3` means one thing for ever, even after its removal. Functions and
pipelines share their names; a pipeline is there in its newest version only.
"""

import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from overwinter.core.errors import ConflictError, NoSpaceError, NotFoundError, StoreError
from overwinter.core.ids import FunctionName
from overwinter.store.sealing import free_bytes

BUSY_TIMEOUT_S = 30.0
PRIMARY_CODE_MASK = 0xFF
PROFILES_MAX = 10_000
INDEX_BYTES = 32 << 10
"""One piece of the index of a write-ahead log; a disk with less room gives an I/O error in place of a full disk."""
_SCHEMAS = (
    (
        "CREATE TABLE node (identity TEXT NOT NULL)",
        "CREATE TABLE names (name TEXT PRIMARY KEY, last_version INTEGER NOT NULL) WITHOUT ROWID",
        """CREATE TABLE functions (name TEXT NOT NULL, version INTEGER NOT NULL, manifest BLOB NOT NULL,
                                   created REAL NOT NULL, proven INTEGER NOT NULL, PRIMARY KEY (name, version))""",
    ),
    (
        """CREATE TABLE pipelines (name TEXT PRIMARY KEY, version INTEGER NOT NULL, pipeline BLOB NOT NULL,
                                   created REAL NOT NULL)""",
    ),
    (
        """CREATE TABLE profiles (machine TEXT NOT NULL, subject TEXT NOT NULL, profile BLOB NOT NULL,
                                  measured REAL NOT NULL, PRIMARY KEY (machine, subject)) WITHOUT ROWID""",
    ),
)
"""What each version of the schema added to the one before."""
SCHEMA_VERSION = len(_SCHEMAS)


class Row(NamedTuple):
    """One registered version, its manifest or pipeline still encoded; `created` in seconds since 1970."""

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
            if db.execute("SELECT 1 FROM pipelines WHERE name = ?", (name,)).fetchone() is not None:
                raise ConflictError(f"{name!r} is a pipeline: remove it first, or give the function another name")
            version = self._next_version(name)
            db.execute("INSERT INTO functions VALUES (?, ?, ?, ?, ?)", (name, version, manifest, created, proven))
        return version

    def put_pipeline(self, name: FunctionName, pipeline: bytes, created: float) -> int:
        """Register a new version of a pipeline in place of the one before, and return its number; ConflictError when
        a function has the name.
        """
        with self._transaction() as db:
            if self._versions(name):
                raise ConflictError(f"{name!r} is a function: remove it first, or give the pipeline another name")
            version = self._next_version(name)
            db.execute("INSERT OR REPLACE INTO pipelines VALUES (?, ?, ?, ?)", (name, version, pipeline, created))
        return version

    def remove_pipeline(self, name: FunctionName) -> None:
        """Forget a pipeline; NotFoundError when there is none."""
        with self._transaction() as db:
            if not db.execute("DELETE FROM pipelines WHERE name = ?", (name,)).rowcount:
                raise NotFoundError(f"no pipeline {name!r} is deployed")

    def pipelines(self) -> list[Row]:
        """All pipelines, by name."""
        with self._lock, _catalog_errors(self._path):
            found = self._db.execute("SELECT name, version, pipeline, created FROM pipelines ORDER BY name")
            return [Row(*row) for row in found]

    def put_profile(self, machine: str, subject: str, profile: bytes, measured: float) -> None:
        """Keep what was measured of a subject on a machine, in place of what was known; the oldest beyond
        PROFILES_MAX go.
        """
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?)", (machine, subject, profile, measured))
            db.execute(
                """DELETE FROM profiles WHERE (machine, subject) IN
                   (SELECT machine, subject FROM profiles ORDER BY measured DESC LIMIT -1 OFFSET ?)""",
                (PROFILES_MAX,),
            )

    def profile(self, machine: str, subject: str) -> bytes | None:
        """What was measured of a subject on a machine, if anything was."""
        with self._lock, _catalog_errors(self._path):
            row = self._db.execute(
                "SELECT profile FROM profiles WHERE machine = ? AND subject = ?", (machine, subject)
            ).fetchone()
        return None if row is None else bytes(row[0])

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

    def _next_version(self, name: FunctionName) -> int:
        (version,) = self._db.execute(
            """INSERT INTO names VALUES (?, 1)
               ON CONFLICT (name) DO UPDATE SET last_version = last_version + 1 RETURNING last_version""",
            (name,),
        ).fetchone()
        return int(version)

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
            for schema in _SCHEMAS[found:]:
                for statement in schema:
                    db.execute(statement)
            if not found:
                db.execute("INSERT INTO node VALUES (?)", (str(uuid.uuid4()),))
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (identity,) = db.execute("SELECT identity FROM node").fetchone()
        return str(identity)

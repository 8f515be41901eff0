"""The catalog of deployed functions and pipelines, and the identity of the node.

It is one SQLite file beside the blocks. A version number is assigned in the transaction that adds the function. Except
in the case below, the same tenant never reuses it for that name, so its `name@3` always means the same version, even
after its removal. Functions and pipelines share one namespace; only the newest version of a pipeline is kept.

The catalog knows the last version of each name that a tenant uses, and of the tenant's NAMES_MAX latest names. Of the
tenant's older unused names together it knows only the highest version; a name that is new to the catalog starts above
that version. It knows a name only for the tenant that used it last. So version numbers may be reused in one case: a
second tenant takes over a name, removes it, and uses NAMES_MAX newer names; then the first tenant uses it again.
"""

import sqlite3
import uuid
from pathlib import Path
from typing import NamedTuple

from overwinter.core.errors import CallerError, ConflictError, ForbiddenError, NotFoundError, StoreError
from overwinter.core.ids import FunctionName, TenantId
from overwinter.core.versions import check_removal
from overwinter.store.compatibility import stored_manifest, stored_pipeline
from overwinter.store.database import Database
from overwinter.store.traffic import forget, stored_shares

BUSY_TIMEOUT_S = 30.0
PROFILES_MAX, TENANT_PROFILES_MAX = 10_000, 5000
"""How many profiles are kept for a machine, at most: of all tenants together, and of one tenant."""
NAMES_MAX = 10_000
"""How many of a tenant's latest names, used or not, keep their last version in the catalog."""
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
    (
        """CREATE TABLE holdings (tenant TEXT NOT NULL, address TEXT NOT NULL, nbytes INTEGER NOT NULL,
                                  touched REAL NOT NULL, PRIMARY KEY (tenant, address)) WITHOUT ROWID""",
        "ALTER TABLE functions ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE pipelines ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
    ),
    ("CREATE TABLE traffic (name TEXT PRIMARY KEY, shares BLOB NOT NULL) WITHOUT ROWID",),
    (
        "ALTER TABLE names ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE names ADD COLUMN given REAL NOT NULL DEFAULT 0",
        "CREATE INDEX names_by_tenant ON names (tenant, given)",
        "CREATE TABLE dropped_names (tenant TEXT PRIMARY KEY, last_version INTEGER NOT NULL) WITHOUT ROWID",
    ),
    ("CREATE INDEX holdings_by_address ON holdings (address)",),
)
"""The statements by which each version of the schema extends the one before."""
SCHEMA_VERSION = len(_SCHEMAS)
TENANTS_VERSION = 4
"""The first schema that records the tenants of functions and pipelines, and which blobs each tenant has sent. Before
it, only the manifests named the tenants.
"""


class Row(NamedTuple):
    """One registered version, its manifest or pipeline still encoded; `created` in seconds since 1970."""

    name: FunctionName
    version: int
    manifest: bytes
    created: float
    tenant: TenantId
    """The owner; empty for an entry of an older schema whose owner could not be found."""


class Catalog:
    """The repository's SQLite file. Any thread and other processes may use it concurrently."""

    def __init__(self, path: Path) -> None:
        """Open or create the catalog at `path`; raise StoreError if it is damaged or has a newer schema."""
        self.file = Database(path, BUSY_TIMEOUT_S)
        try:
            self.node_identity = self._prepare()
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def add(self, name: FunctionName, tenant: TenantId, manifest: bytes, created: float, proven: bool = True) -> int:
        """Register a new version of `name` and return its number, higher than any that the tenant's `name` is known to
        have had.

        Raises ConflictError if a pipeline has the name, ForbiddenError if another tenant has a version of it.
        """
        with self.file.transaction() as db:
            if db.execute("SELECT 1 FROM pipelines WHERE name = ?", (name,)).fetchone() is not None:
                raise ConflictError(f"{name!r} is a pipeline: remove it first, or give the function another name")
            _check_tenant(db, "functions", "function", name, tenant)
            version = _next_version(db, name, tenant, created)
            values = (name, version, manifest, created, proven, tenant)
            db.execute("INSERT INTO functions VALUES (?, ?, ?, ?, ?, ?)", values)
        return version

    def put_pipeline(self, name: FunctionName, tenant: TenantId, pipeline: bytes, created: float) -> int:
        """Register a new version of a pipeline, replacing the previous one, and return its number.

        Raises ConflictError if a function has the name, ForbiddenError if the previous version belongs to another
        tenant.
        """
        with self.file.transaction() as db:
            if _versions(db, name):
                raise ConflictError(f"{name!r} is a function: remove it first, or give the pipeline another name")
            _check_tenant(db, "pipelines", "pipeline", name, tenant)
            version = _next_version(db, name, tenant, created)
            values = (name, version, pipeline, created, tenant)
            db.execute("INSERT OR REPLACE INTO pipelines VALUES (?, ?, ?, ?, ?)", values)
        return version

    def remove_pipeline(self, name: FunctionName) -> None:
        """Remove a pipeline; raise NotFoundError if there is none."""
        with self.file.transaction() as db:
            if not db.execute("DELETE FROM pipelines WHERE name = ?", (name,)).rowcount:
                raise NotFoundError(f"no pipeline {name!r} is deployed")

    def pipelines(self) -> list[Row]:
        """All pipelines, by name."""
        with self.file.reading() as db:
            found = db.execute("SELECT name, version, pipeline, created, tenant FROM pipelines ORDER BY name")
            return [Row(*row) for row in found]

    def put_profile(self, machine: str, subject: str, profile: bytes, measured: float) -> None:
        """Store the profile of a subject (a tenant's program, with its handler if there is one) on a machine, replacing
        an earlier one. The oldest beyond TENANT_PROFILES_MAX and PROFILES_MAX are dropped.
        """
        tenant = subject.rpartition("/")[0]
        with self.file.transaction() as db:
            db.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?)", (machine, subject, profile, measured))
            # "0" follows "/", so the first range contains the tenant's subjects. The second one contains all.
            for first, end, most in (
                (f"{tenant}/", f"{tenant}0", TENANT_PROFILES_MAX),
                ("", "\U0010ffff", PROFILES_MAX),
            ):
                db.execute(
                    """DELETE FROM profiles WHERE machine = ?1 AND subject IN
                       (SELECT subject FROM profiles WHERE machine = ?1 AND subject >= ?2 AND subject < ?3
                        ORDER BY measured DESC LIMIT -1 OFFSET ?4)""",
                    (machine, first, end, most),
                )

    def profile(self, machine: str, subject: str) -> bytes | None:
        """The profile of a subject on a machine, if there is one."""
        with self.file.reading() as db:
            row = db.execute(
                "SELECT profile FROM profiles WHERE machine = ? AND subject = ?", (machine, subject)
            ).fetchone()
        return None if row is None else bytes(row[0])

    def remove(self, name: FunctionName, version: int | None) -> tuple[int, ...]:
        """Remove one version, or all with None, and return their numbers. Raises NotFoundError when there is none, and
        ConflictError when the version has a share of the requests and a version remains that has passed its trial.
        """
        with self.file.transaction() as db:
            present = _versions(db, name)
            gone = present if version is None else tuple(number for number in present if number == version)
            if not gone:
                raise _not_found(name, version, present)
            if set(_versions(db, name, proven=True)) <= set(gone):
                # No other version is left that could be promoted. Without shares, a version on trial gets the requests
                # once it passes.
                forget(db, name)
            else:
                check_removal(name, stored_shares(db, name), gone)
            db.executemany("DELETE FROM functions WHERE name = ? AND version = ?", [(name, number) for number in gone])
        return gone

    def prove(self, name: FunctionName, version: int) -> None:
        """Record that the version has passed its trial; raise NotFoundError if it was removed meanwhile."""
        with self.file.transaction() as db:
            done = db.execute("UPDATE functions SET proven = 1 WHERE name = ? AND version = ?", (name, version))
            if not done.rowcount:
                raise _not_found(name, version, _versions(db, name))

    def forget_unproven(self) -> None:
        """Remove versions that have not passed their trial; must not be called while a trial is in progress."""
        with self.file.transaction() as db:
            db.execute("DELETE FROM functions WHERE NOT proven")

    def get(self, name: FunctionName, version: int | None) -> Row:
        """Return one version, or the newest with None, even if it is on trial; raise NotFoundError if there is none."""
        with self.file.reading() as db:
            row = db.execute(
                """SELECT name, version, manifest, created, tenant FROM functions
                   WHERE name = ? AND version = coalesce(?, version) ORDER BY version DESC LIMIT 1""",
                (name, version),
            ).fetchone()
            if row is None:
                raise _not_found(name, version, _versions(db, name))
        return Row(*row)

    def versions(self) -> list[tuple[FunctionName, int]]:
        """Return all versions, including those on trial."""
        with self.file.reading() as db:
            # SQLite answers this from the index of the primary key, without reading a manifest.
            found = db.execute("SELECT name, version FROM functions")
            return [(FunctionName(name), int(version)) for name, version in found]

    def rows(self, unproven: bool = False) -> list[Row]:
        """Return all versions that have passed their trial, or with `unproven` all, by name and number."""
        with self.file.reading() as db:
            found = db.execute(
                """SELECT name, version, manifest, created, tenant FROM functions WHERE proven OR ?
                   ORDER BY name, version""",
                (unproven,),
            )
            return [Row(*row) for row in found]

    def _prepare(self) -> str:
        with self.file.transaction() as db:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found > SCHEMA_VERSION:
                raise StoreError(
                    f"{self.file.path} has schema {found}, this Overwinter knows {SCHEMA_VERSION}: "
                    f"use a newer Overwinter, or another directory"
                )
            for schema in _SCHEMAS[found:]:
                for statement in schema:
                    db.execute(statement)
            if found < TENANTS_VERSION:
                _record_tenants(db)
            if not found:
                db.execute("INSERT INTO node VALUES (?)", (str(uuid.uuid4()),))
            if found < SCHEMA_VERSION:
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (identity,) = db.execute("SELECT identity FROM node").fetchone()
        return str(identity)


def _next_version(db: sqlite3.Connection, name: FunctionName, tenant: TenantId, created: float) -> int:
    (version,) = db.execute(
        """INSERT INTO names SELECT ?1, 1 + coalesce(max(last_version), 0), ?2, ?3 FROM dropped_names WHERE tenant = ?2
           ON CONFLICT (name) DO UPDATE SET tenant = ?2, given = ?3, last_version =
               CASE tenant WHEN ?2 THEN last_version + 1 ELSE max(last_version + 1, excluded.last_version) END
           RETURNING last_version""",
        (name, tenant, created),
    ).fetchone()
    _drop_names(db, tenant)
    return int(version)


def _drop_names(db: sqlite3.Connection, tenant: TenantId) -> None:
    """Drop the names that a tenant no longer uses, except the latest."""
    unused = """FROM names WHERE tenant = ?1 AND given < (SELECT given FROM names WHERE tenant = ?1
                                                         ORDER BY given DESC LIMIT 1 OFFSET ?2)
                AND name NOT IN (SELECT name FROM functions) AND name NOT IN (SELECT name FROM pipelines)"""
    db.execute(
        f"""INSERT INTO dropped_names SELECT ?1, max(last_version) {unused} HAVING count(*)
            ON CONFLICT (tenant) DO UPDATE SET last_version = max(last_version, excluded.last_version)""",
        (tenant, NAMES_MAX - 1),
    )
    db.execute(f"DELETE {unused}", (tenant, NAMES_MAX - 1))


def _versions(db: sqlite3.Connection, name: FunctionName, proven: bool = False) -> tuple[int, ...]:
    """Return the versions of a function, ascending; with `proven` only those that have passed their trial."""
    query = "SELECT version FROM functions WHERE name = ? AND proven >= ? ORDER BY version"
    found = db.execute(query, (name, proven))
    return tuple(number for (number,) in found)


def _not_found(name: FunctionName, version: int | None, present: tuple[int, ...]) -> NotFoundError:
    if not present:
        return NotFoundError(f"no function {name!r} is deployed")
    return NotFoundError(f"function {name!r} has no version {version}; it has {', '.join(map(str, present))}")


def _check_tenant(db: sqlite3.Connection, table: str, kind: str, name: FunctionName, tenant: TenantId) -> None:
    """Raise ForbiddenError if the name belongs to another tenant."""
    query = f"SELECT 1 FROM {table} WHERE name = ? AND tenant NOT IN ('', ?)"
    if db.execute(query, (name, tenant)).fetchone() is not None:
        raise ForbiddenError(f"{kind} {name!r} belongs to another tenant: choose another name")


def _record_tenants(db: sqlite3.Connection) -> None:
    """Record the tenants of an older repository's functions from their manifests, and so who has sent which blobs."""
    rows = db.execute("SELECT name, version, manifest, created FROM functions").fetchall()
    for name, version, encoded, created in rows:
        try:
            manifest, _ = stored_manifest(encoded)
        except CallerError:
            # The error is reported when the deployment is read.
            continue
        tenant = manifest.tenant
        db.execute("UPDATE functions SET tenant = ? WHERE name = ? AND version = ?", (tenant, name, version))
        held = [(tenant, blob.address, blob.nbytes, created) for blob in manifest.blobs()]
        db.executemany("INSERT OR IGNORE INTO holdings VALUES (?, ?, ?, ?)", held)
    for name, encoded in db.execute("SELECT name, pipeline FROM pipelines").fetchall():
        try:
            stage = next(iter(stored_pipeline(encoded)[0].stages.values()))
        except CallerError:
            continue
        found = db.execute(
            "SELECT tenant FROM functions WHERE name = ? ORDER BY version DESC", (stage.function,)
        ).fetchone()
        if found is not None:
            db.execute("UPDATE pipelines SET tenant = ? WHERE name = ?", (*found, name))

"""The daily usage of each function, in a separate SQLite file, so that it does not delay serving."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from overwinter.core.ids import FunctionName, TenantId
from overwinter.store.database import Database

BUSY_TIMEOUT_S = 5.0
REMOVED_MAX = 1000
"""The removed functions of one tenant whose usage is kept separately: those with the most recent usage."""
MERGED = FunctionName("")
"""The name for the usage of all other removed functions of a tenant."""


class Amounts(msgspec.Struct, frozen=True):
    """Amounts of usage. Each function that shares a block has its part of the block's byte-seconds."""

    requests: int = 0
    """The answered requests."""
    core_s: float = 0.0
    """The time of runs and binds on each of their cores, and what workers computed beyond that."""
    idle_core_s: float = 0.0
    """The idle time of workers, counted for each core."""
    disk_byte_s: float = 0.0
    host_byte_s: float = 0.0
    private_byte_s: float = 0.0
    device_s: float = 0.0
    """The run time on devices."""
    idle_device_s: float = 0.0
    """The time in the host store without a run, for functions that run on devices."""
    moved_bytes: float = 0.0
    """The bytes that were transferred to devices for runs."""
    device_byte_s: float = 0.0

    def plus(self, other: "Amounts", times: int = 1) -> "Amounts":
        """Return the sum; with `times` -1 the difference."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Amounts(*(mine + times * its for mine, its in pairs))


class Entry(NamedTuple):
    """The usage of one function since a day, such as `2025-12-31`, in UTC."""

    since: str
    tenant: TenantId
    function: FunctionName
    amounts: Amounts


_COLUMNS = Amounts.__struct_fields__
_SCHEMA = f"""CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, tenant TEXT NOT NULL, function TEXT NOT NULL,
    {", ".join(f"{column} REAL NOT NULL DEFAULT 0" for column in _COLUMNS)},
    PRIMARY KEY (day, tenant, function)) WITHOUT ROWID"""
_ADDING = f"ON CONFLICT DO UPDATE SET {', '.join(f'{column} = {column} + excluded.{column}' for column in _COLUMNS)}"
_ADD = f"""INSERT INTO usage VALUES (?, ?, ?, {", ".join("?" for _ in _COLUMNS)})
    {_ADDING}"""
_SUMS = ", ".join(f"sum({column})" for column in _COLUMNS)
_TOTALS = f"""SELECT min(day), tenant, function, {_SUMS} FROM usage WHERE tenant = coalesce(?, tenant)
    GROUP BY tenant, function ORDER BY tenant, function"""
_FIND_OLD = """CREATE TEMP TABLE old AS SELECT tenant, function FROM (
    SELECT tenant, function, row_number() OVER (PARTITION BY tenant ORDER BY max(day) DESC, function) AS place
    FROM usage WHERE function != ? AND function NOT IN (SELECT value FROM json_each(?)) GROUP BY tenant, function)
    WHERE place > ?"""
_MERGE_OLD = f"""INSERT INTO usage SELECT day, tenant, ?, {_SUMS} FROM usage
    WHERE (tenant, function) IN old GROUP BY day, tenant {_ADDING}"""
_DELETE_OLD = "DELETE FROM usage WHERE (tenant, function) IN old"


class UsageFile:
    """The usage file. Any thread may use it. Raises StoreError or NoSpaceError when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = Database(path, BUSY_TIMEOUT_S)
        try:
            with self._file.transaction() as db:
                db.execute(_SCHEMA)
                # A file of an older version lacks the last columns.
                known = {name for _, name, *_ in db.execute("PRAGMA table_info(usage)")}
                for column in [each for each in _COLUMNS if each not in known]:
                    db.execute(f"ALTER TABLE usage ADD COLUMN {column} REAL NOT NULL DEFAULT 0")
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, day: str, used: Mapping[tuple[TenantId, FunctionName], Amounts]) -> None:
        """Add to the usage of a day: everything or, after an error, nothing."""
        rows = [(day, *key, *msgspec.structs.astuple(amounts)) for key, amounts in used.items()]
        with self._file.transaction() as db:
            db.executemany(_ADD, rows)

    def merge_removed(self, deployed: Collection[FunctionName]) -> None:
        """Merge each tenant's removed functions, except the last `REMOVED_MAX`, into one row for each day. Otherwise
        the file would grow with each function that is ever deployed. The totals of a tenant and a day stay the same.
        """
        with self._file.transaction() as db:
            db.execute(_FIND_OLD, (MERGED, msgspec.json.encode(list(deployed)).decode(), REMOVED_MAX))
            db.execute(_MERGE_OLD, (MERGED,))
            db.execute(_DELETE_OLD)
            db.execute("DROP TABLE old")

    def entries(self, tenant: TenantId | None = None) -> list[Entry]:
        """Return the usage of each function, of all tenants or of one, with its first day with usage."""
        with self._file.reading() as db:
            found = db.execute(_TOTALS, (tenant,)).fetchall()
        return [Entry(day, owner, name, Amounts(int(requests), *rest)) for day, owner, name, requests, *rest in found]

"""Records which tenant holds which blobs.

An address gives no permission, because a tenant may know the address without knowing the content. A tenant holds a blob
after it has sent the blob's bytes itself, as long as one of its functions needs the blob, and for a while after it last
asked for it or sent it. Nothing here reveals to one tenant what another holds.
"""

from collections.abc import Collection, Iterable, Mapping, Set

from overwinter.core.errors import NoSpaceError
from overwinter.core.ids import Address, TenantId
from overwinter.store.database import Database
from overwinter.store.disk import DISK_PAGE_BYTES


class Holdings:
    """The table of holdings, in the catalog's file. Times are in seconds since 1970."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def touch(self, tenant: TenantId, addresses: Collection[Address], now: float) -> set[Address]:
        """Return those of `addresses` that the tenant holds, and renew these holdings at `now` for the grace period."""
        with self._file.reading() as db:
            query = "SELECT 1 FROM holdings WHERE tenant = ? AND address = ?"
            held = {each for each in addresses if db.execute(query, (tenant, each)).fetchone() is not None}
        if held:
            with self._file.transaction() as db:
                rows = [(now, tenant, each) for each in held]
                db.executemany("UPDATE holdings SET touched = ? WHERE tenant = ? AND address = ?", rows)
        return held

    def add(self, tenant: TenantId, address: Address, nbytes: int, now: float, most: int | None) -> bool:
        """Record that the tenant has sent these bytes; return whether the holding is new.

        Raises NoSpaceError when it would hold more than `most`, each file in whole pages.
        """
        with self._file.transaction() as db:
            query = "SELECT 1 FROM holdings WHERE tenant = ? AND address = ?"
            new = db.execute(query, (tenant, address)).fetchone() is None
            db.execute("INSERT OR REPLACE INTO holdings VALUES (?, ?, ?, ?)", (tenant, address, nbytes, now))
            if new and most is not None:
                (held,) = db.execute(f"SELECT {_SUM_OF_BYTES} FROM holdings WHERE tenant = ?", (tenant,)).fetchone()
                if held > most:
                    raise limit_error(tenant, most)
        return new

    def held_bytes(self, tenant: TenantId, address: Address) -> tuple[int, int]:
        """The disk space of everything that the tenant holds, and of one blob of it."""
        query = f"SELECT {_SUM_OF_BYTES} FROM holdings WHERE tenant = ?"
        with self._file.reading() as db:
            (held,) = db.execute(query, (tenant,)).fetchone()
            (one,) = db.execute(f"{query} AND address = ?", (tenant, address)).fetchone()
        return int(held), int(one)

    def since(self, time: float) -> set[Address]:
        """Return the addresses that any tenant touched after `time`."""
        with self._file.reading() as db:
            found = db.execute("SELECT address FROM holdings WHERE touched > ?", (time,))
            return {Address(address) for (address,) in found}

    def forget(self, until: float, needed: Mapping[TenantId, Set[Address]]) -> None:
        """Remove holdings last renewed before this time, except those that functions of the same tenant need."""
        with self._file.transaction() as db:
            found = db.execute("SELECT tenant, address FROM holdings WHERE touched <= ?", (until,)).fetchall()
            old: Iterable[tuple[TenantId, Address]] = (
                (tenant, address) for tenant, address in found if address not in needed.get(tenant, ())
            )
            db.executemany("DELETE FROM holdings WHERE tenant = ? AND address = ?", old)


_SUM_OF_BYTES = f"coalesce(sum(max(1, (nbytes + {DISK_PAGE_BYTES - 1}) / {DISK_PAGE_BYTES}) * {DISK_PAGE_BYTES}), 0)"


def limit_error(tenant: TenantId, most: int) -> NoSpaceError:
    """Return the error for a tenant that would hold too much."""
    return NoSpaceError(
        f"tenant {tenant!r} would hold more than {most} bytes, the limit of a tenant on this node's disk: remove "
        "functions that are not needed; blocks without a function are deleted after a while"
    )

"""Records which tenant holds which blobs.

An address gives no permission, because a tenant may know the address without knowing the content. A tenant holds a blob
after it has sent the blob's bytes itself, as long as one of its functions needs the blob, and for a while after the
tenant last asked for it, sent it or registered a function with it. Nothing here reveals to one tenant what another
holds.
"""

from collections.abc import Collection, Iterable, Iterator

from overwinter.core.errors import NoSpaceError
from overwinter.core.ids import Address, TenantId
from overwinter.store.database import Database
from overwinter.store.disk import DISK_PAGE_BYTES

AT_ONCE = 4096
"""The most holdings that are read in one step."""
_Row = tuple[TenantId, Address, float]
"""Tenant, address, and when the holding was last renewed."""


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

        Raises NoSpaceError when the tenant would hold more than `most`, each file in whole pages.
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
        """Return the addresses that any tenant renewed after `time`."""
        return {address for _, address, touched in self._every() if touched > time}

    def until(self, time: float, only: Collection[Address] | None = None) -> Iterator[tuple[TenantId, Address]]:
        """Yield tenant and address of holdings last renewed at `time` or before; with `only`, of these addresses."""
        for tenant, address, touched in self._every() if only is None else self._of(only):
            if touched <= time:
                yield tenant, address

    def renewed(self, addresses: Iterable[Address], time: float) -> set[Address]:
        """Return those of `addresses` that any tenant renewed after `time`."""
        return {address for _, address, touched in self._of(addresses) if touched > time}

    def forget(self, held: Iterable[tuple[TenantId, Address]], until: float) -> None:
        """Remove these holdings, except those renewed after `until`."""
        with self._file.transaction() as db:
            query = "DELETE FROM holdings WHERE tenant = ? AND address = ? AND touched <= ?"
            db.executemany(query, [(tenant, address, until) for tenant, address in held])

    def _every(self) -> Iterator[_Row]:
        """Yield all holdings, in steps: a tenant may have millions, and others must not wait for all of them."""
        rows = [("", "", 0.0)]
        query = "SELECT tenant, address, touched FROM holdings WHERE (tenant, address) > (?, ?) LIMIT ?"
        while rows:
            with self._file.reading() as db:
                rows = db.execute(query, (*rows[-1][:2], AT_ONCE)).fetchall()
            yield from map(_row, rows)

    def _of(self, addresses: Iterable[Address]) -> Iterator[_Row]:
        query = "SELECT tenant, address, touched FROM holdings WHERE address = ?"
        with self._file.reading() as db:
            found = [row for each in addresses for row in db.execute(query, (each,)).fetchall()]
        yield from map(_row, found)


def _row(row: tuple[str, str, float]) -> _Row:
    return TenantId(row[0]), Address(row[1]), row[2]


_SUM_OF_BYTES = f"coalesce(sum(max(1, (nbytes + {DISK_PAGE_BYTES - 1}) / {DISK_PAGE_BYTES}) * {DISK_PAGE_BYTES}), 0)"


def limit_error(tenant: TenantId, most: int) -> NoSpaceError:
    """Return the error for a tenant that would hold too much."""
    return NoSpaceError(
        f"tenant {tenant!r} would hold more than {most} bytes, its limit on this node's disk: remove "
        "functions that are not needed; blocks without a function are deleted after a while"
    )

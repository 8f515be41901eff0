"""Stores which versions get the requests that name no version, in a table of the catalog's file."""

import sqlite3

import msgspec

from overwinter.core.errors import NotFoundError
from overwinter.core.ids import FunctionName
from overwinter.core.versions import Shares
from overwinter.store.database import Database

_decode = msgspec.json.Decoder(Shares).decode


class StoredTraffic:
    """The stored shares of each function with a promotion or a split."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def put(self, name: FunctionName, shares: Shares) -> None:
        """Store the shares of a function, or with none remove them; raise NotFoundError unless each version has passed
        its trial.
        """
        with self._file.transaction() as db:
            query = "SELECT version FROM functions WHERE name = ? AND proven ORDER BY version"
            present = [number for (number,) in db.execute(query, (name,))]
            for share in shares:
                if share.version not in present:
                    has = f"it has {', '.join(map(str, present))}" if present else "no version of it is deployed"
                    raise NotFoundError(f"function {name!r} has no version {share.version}; {has}")
            forget(db, name)
            if shares:
                db.execute("INSERT INTO traffic VALUES (?, ?)", (name, msgspec.json.encode(shares)))

    def all(self) -> dict[FunctionName, Shares]:
        """Return all stored shares, by name."""
        with self._file.reading() as db:
            found = db.execute("SELECT name, shares FROM traffic ORDER BY name").fetchall()
        return {FunctionName(name): _decode(shares) for name, shares in found}


def forget(db: sqlite3.Connection, name: FunctionName) -> None:
    """Remove the shares of a function."""
    db.execute("DELETE FROM traffic WHERE name = ?", (name,))


def stored_shares(db: sqlite3.Connection, name: FunctionName) -> Shares:
    """Return the shares of a function."""
    row = db.execute("SELECT shares FROM traffic WHERE name = ?", (name,)).fetchone()
    return () if row is None else _decode(row[0])

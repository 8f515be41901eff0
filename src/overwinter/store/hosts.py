"""The host stores: the shared one, and one for each tenant with a dedicated store (section 3.3 of Tetris's paper).

A dedicated store is a separate directory in that of the shared store. Its blocks are shared only among that tenant's
functions, so that the latency of a wake does not reveal what another tenant holds.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from overwinter.core.ids import SHARED, StoreName
from overwinter.store.disk import free_bytes
from overwinter.store.host import HostStore, Source, VerificationCounts
from overwinter.store.removal import Removals
from overwinter.store.residency import Sized

PREFIX = "tenant."


class HostStores:
    """All host stores of a node, created on demand. The scheduler bounds their sizes."""

    def __init__(self, root: Path, repository: Source) -> None:
        self.root = root
        self.verification = VerificationCounts()
        self.removals = Removals()
        self._repository = repository
        self._stores = {SHARED: HostStore(root, repository, self.verification, self.removals)}

    def store(self, name: StoreName) -> HostStore:
        """The store of that name."""
        store = self._stores.get(name)
        if store is None:
            store = self._stores[name] = HostStore(
                self.root / f"{PREFIX}{name}", self._repository, self.verification, self.removals, self.root
            )
        return store

    def every(self) -> Mapping[StoreName, HostStore]:
        """Return the existing stores, by name."""
        return dict(self._stores)

    def capacity_bytes(self) -> int | None:
        """Return the bytes that the tmpfs has for the stores, including those that they hold; None while blocks are
        being copied or removed.
        """
        held, free = self._settled_bytes(), free_bytes(self.root)
        # Bytes that are removed meanwhile may count both as held and as free; bytes that are copied, as neither.
        return None if held is None or held != self._settled_bytes() else free + held

    def _settled_bytes(self) -> int | None:
        """Return the bytes that the stores hold; None while blocks are being copied or removed."""
        stores = list(self._stores.values())
        # Summed before the check, so that a later change is seen by the check, or as another sum in the next call.
        held = sum(store.occupied_bytes for store in stores)
        is_changing = any(store.is_copying for store in stores) or self.removals.sizes
        return None if is_changing else held

    def sweep(self, needed: Mapping[StoreName, Iterable[Sized]]) -> None:
        """Remove all blocks that are not `needed`, those of an earlier run of the node too, and the unused stores."""
        left = {StoreName(path.name[len(PREFIX) :]) for path in self.root.glob(f"{PREFIX}*")}
        for name in {*left, *needed, *self._stores}:
            self.store(name).sweep(needed.get(name, ()))
            if name != SHARED and name not in needed:
                self._stores.pop(name).root.rmdir()

    def close(self) -> None:
        """Remove all stores, and free their memory."""
        self.removals.remove()
        self.sweep({})
        self.root.rmdir()

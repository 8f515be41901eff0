"""Finds the functions of a family that have most of their weights in common, so that they may share runs."""

from collections import Counter
from collections.abc import Mapping

from overwinter.core.ids import Address, FunctionId
from overwinter.scheduler.latency import Trunk, separate_part_of

COMMON_PART = 0.5
"""The part of their bytes that functions must have in common for their requests to share a run."""


class Trunks(dict[FunctionId, Trunk]):
    """The trunks of a family, by the member that started each."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[Address, dict[FunctionId, None]] = {}
        """The trunks that have each block."""
        self._members: Counter[FunctionId] = Counter()

    def join(self, function: FunctionId, sizes: Mapping[Address, int]) -> FunctionId:
        """Add a function with these blocks; return the member that started its trunk, which may be itself."""
        found = self._matching_trunk(sizes)
        if found is None:
            if function in self:
                # An earlier function of this name started a trunk that other functions still have.
                self._forget(function)
            found, self[function] = function, Trunk(sizes)
            for address in sizes:
                self._holders.setdefault(address, {})[function] = None
        self._members[found] += 1
        return found

    def leave(self, id_: FunctionId) -> None:
        """Remove a function of this trunk."""
        self._members[id_] -= 1
        if not self._members[id_]:
            del self._members[id_]
            self._forget(id_)

    def _forget(self, id_: FunctionId) -> None:
        for address in self.pop(id_).sizes:
            self._holders[address].pop(id_)
            if not self._holders[address]:
                del self._holders[address]

    def _matching_trunk(self, sizes: Mapping[Address, int]) -> FunctionId | None:
        common: Counter[FunctionId] = Counter()
        for address, nbytes in sizes.items():
            for id_ in self._holders.get(address, ()):
                common[id_] += nbytes
        least = COMMON_PART * sum(sizes.values())
        # Functions without weights are all alike.
        candidates = [id_ for id_, nbytes in common.items() if nbytes >= least] if sizes else list(self)
        for id_ in candidates:
            part = separate_part_of(sizes, self[id_].sizes)
            if part <= 1 - COMMON_PART:
                self[id_].guess(part)
                return id_
        return None

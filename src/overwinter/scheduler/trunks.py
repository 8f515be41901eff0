"""Finds the functions of a family that have most of their weights in common, so that they may share runs."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice

import msgspec

from overwinter.core.ids import Address, FunctionId
from overwinter.scheduler.sharing_costs import Sharing

COMMON_PART = 0.5
"""The part of the bytes of the larger of two functions that both must have for their requests to share a run."""
SMOOTHING = 0.2
"""The weight of the latest shared run in the estimate of `separate_part`."""
COMPARED_MAX = 32
"""The most trunks with which a new function is compared, and the most that are looked at for each block."""


def separate_part_of(blocks: Mapping[Address, int], *others: Mapping[Address, int]) -> float:
    """Return the part of the largest function's bytes that these functions do not have in common."""
    common = sum(nbytes for address, nbytes in blocks.items() if all(address in each for each in others))
    most = max(sum(each.values()) for each in (blocks, *others))
    return 1 - common / most if most else 0.0


class Trunk(msgspec.Struct, eq=False):
    """Functions of a family that have most of their weights in common."""

    sizes: Mapping[Address, int]
    """The blocks of the function that started the trunk."""
    separate_part: float = 0.0
    """The part of a run that is separate for each function: estimated by bytes, then from the times of shared runs."""
    _spread: float | None = None
    """The smoothed square of the relative time that shared runs could have saved; None: there was none."""
    sharing: Sharing = msgspec.field(default_factory=Sharing)
    """Whether sharing runs reduces their time."""
    waiting: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """The functions with waiting requests."""

    def guess(self, separate_part: float) -> None:
        """Account for a function with this part of separate bytes."""
        if self._spread is None:
            self.separate_part = max(self.separate_part, separate_part)

    def observe(self, together: float, apart: float, seconds: float) -> None:
        """Update `separate_part` by the time of a shared run: least squares, with the latest runs weighted most."""
        could_save = apart / together - 1
        if could_save <= 0:
            # Such a run gives no information.
            return
        spread = 1.0 if self._spread is None else self._spread
        took = self.separate_part * spread
        more = min(max(seconds / together - 1, 0.0), could_save)
        self._spread = spread + SMOOTHING * (could_save * could_save - spread)
        self.separate_part = (took + SMOOTHING * (more * could_save - took)) / self._spread


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

    def leave(self, trunk: FunctionId) -> None:
        """Remove one function from a trunk. `trunk`: the function that started it."""
        self._members[trunk] -= 1
        if not self._members[trunk]:
            del self._members[trunk]
            self._forget(trunk)

    def _forget(self, trunk: FunctionId) -> None:
        for address in self.pop(trunk).sizes:
            self._holders[address].pop(trunk)
            if not self._holders[address]:
                del self._holders[address]

    def _matching_trunk(self, sizes: Mapping[Address, int]) -> FunctionId | None:
        common: Counter[FunctionId] = Counter()
        for address, nbytes in _largest(sizes).items():
            for id_ in islice(reversed(self._holders.get(address, {})), COMPARED_MAX):
                common[id_] += nbytes
        # Functions without weights are all alike.
        candidates = [id_ for id_, _ in common.most_common(COMPARED_MAX)] if sizes else list(islice(self, COMPARED_MAX))
        for id_ in candidates:
            part = separate_part_of(sizes, self[id_].sizes)
            if part <= 1 - COMMON_PART:
                self[id_].guess(part)
                return id_
        return None


def _largest(sizes: Mapping[Address, int]) -> dict[Address, int]:
    """Return the largest blocks, which have more than half of the bytes: a matching trunk has one of them."""
    found, left = dict[Address, int](), (1 - COMMON_PART) * sum(sizes.values())
    for address, nbytes in sorted(sizes.items(), key=lambda each: -each[1]):
        if left < 0:
            break
        found[address] = nbytes
        left -= nbytes
    return found

"""Chooses the version that answers a request without a version.

By default this is the newest version. A promotion gives one version all such requests, and a split gives several
versions a share each; new versions then get none until they are promoted or get a share. Under a split, smooth weighted
round robin chooses the version from the previous choices. Because nothing is random, a journal can be replayed, and any
hundred consecutive requests are divided exactly.
"""

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from overwinter.core.errors import CallerError, ConflictError
from overwinter.core.ids import FunctionName

WHOLE = 100
"""All requests, in per cent."""
SHARES_MAX = 8
"""The most versions in one split."""


class Share(msgspec.Struct, frozen=True):
    """The share of one version in the requests without a version."""

    version: Annotated[int, Meta(ge=1)]
    percent: Annotated[int, Meta(ge=1, le=WHOLE)]


Shares = tuple[Share, ...]
"""The shares of a split; empty: the newest version gets all requests without a version."""


def check_shares(shares: Shares) -> None:
    """Raise CallerError unless each version is named once and the shares add up to 100 per cent. An empty tuple is
    valid.
    """
    versions = [share.version for share in shares]
    for version in versions:
        if versions.count(version) > 1:
            raise CallerError(f"version {version} has two shares: give it only one")
    total = sum(share.percent for share in shares)
    if shares and total != WHOLE:
        raise CallerError(f"the shares are {total} per cent together: they must be {WHOLE}")


def check_removal(name: FunctionName, shares: Shares, gone: Collection[int]) -> None:
    """Raise ConflictError when a version to be removed has a share."""
    for share in shares:
        if share.version in gone:
            raise ConflictError(
                f"version {share.version} of {name!r} gets {share.percent} per cent of the requests without a version: "
                "promote another version first"
            )


def default_of(versions: Sequence[int], shares: Shares) -> int:
    """Return the version with the largest share, the newest among equals or without shares; `versions` is ascending."""
    return max(shares, key=lambda each: (each.percent, each.version)).version if shares else versions[-1]


class Versions(msgspec.Struct):
    """The versions of one name that passed their trial."""

    numbers: list[int] = []
    """The versions that passed their trial, ascending."""
    shares: Shares = ()
    _credits: dict[int, int] = {}
    """How far the requests of each version with a share are behind that share, in hundredths of a request."""

    @property
    def default(self) -> int:
        """The version with the largest share, or the newest: it stands for the name where one version is needed."""
        return default_of(self.numbers, self.shares)

    def percent(self, version: int) -> int:
        """Return the share of a version in the requests without a version."""
        if not self.shares:
            return WHOLE if self.numbers[-1:] == [version] else 0
        return next((share.percent for share in self.shares if share.version == version), 0)

    def choose(self) -> int:
        """Choose the version for the next request without a version."""
        if not self.shares:
            return self.numbers[-1]
        for share in self.shares:
            self._credits[share.version] += share.percent
        first = max(self.shares, key=lambda share: self._credits[share.version]).version
        self._credits[first] -= WHOLE
        return first

    def split(self, shares: Shares) -> None:
        """From now on these versions get the requests without a version. If one of them is not in `numbers`, the newest
        version gets all.
        """
        self.shares = shares if all(share.version in self.numbers for share in shares) else ()
        self._credits = {share.version: 0 for share in self.shares}

    def add(self, version: int) -> None:
        """Add a version that has passed its trial."""
        self.numbers.append(version)
        self.numbers.sort()

    def discard(self, version: int) -> None:
        """Remove a version, if it exists. If it has a share, the split ends, and the newest version gets all requests
        without a version.
        """
        if version in self.numbers:
            self.numbers.remove(version)
            if any(share.version == version for share in self.shares):
                self.split(())

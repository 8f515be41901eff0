"""Chooses which version of a function answers a request that names none.

By default this is the newest version. A promotion gives one version all such requests, a split gives several versions a
share each. From then on a new version gets none until it is promoted. Under a split, smooth weighted round robin
chooses the version from the choices before, without randomness: a journal replays, and any hundred consecutive requests
are divided exactly.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from overwinter.core.errors import CallerError

WHOLE = 100
"""Per cent of the requests."""
SHARES_MAX = 8
"""Versions of one split."""


class Share(msgspec.Struct, frozen=True):
    """What one version gets of the requests that name none."""

    version: Annotated[int, Meta(ge=1)]
    percent: Annotated[int, Meta(ge=1, le=WHOLE)]


Shares = tuple[Share, ...]
"""Empty: the newest version has all."""


def check_shares(shares: Shares) -> None:
    """CallerError unless each version is named once and the shares make a whole."""
    versions = [share.version for share in shares]
    for version in versions:
        if versions.count(version) > 1:
            raise CallerError(f"version {version} is given two shares: give it one")
    total = sum(share.percent for share in shares)
    if shares and total != WHOLE:
        raise CallerError(f"the shares are {total} per cent together: they must be {WHOLE}")


def default_of(versions: Sequence[int], shares: Shares) -> int:
    """The version with the largest share, among equals the newest; `versions` are those that answer, ascending."""
    return max(shares, key=lambda each: (each.percent, each.version)).version if shares else versions[-1]


class Versions(msgspec.Struct):
    """The versions of one name that answer requests."""

    numbers: list[int] = []
    """Those that have proved themselves, ascending."""
    shares: Shares = ()
    _credits: dict[int, int] = {}
    """Of each version that has a share: how far its turn is behind."""

    @property
    def default(self) -> int:
        """The version that represents the name."""
        return default_of(self.numbers, self.shares)

    def percent(self, version: int) -> int:
        """The share of a version in the requests that name none."""
        if not self.shares:
            return WHOLE if self.numbers[-1:] == [version] else 0
        return next((share.percent for share in self.shares if share.version == version), 0)

    def turn(self) -> int:
        """The version that gets the next request that names none."""
        if not self.shares:
            return self.numbers[-1]
        for share in self.shares:
            self._credits[share.version] += share.percent
        first = max(self.shares, key=lambda share: self._credits[share.version]).version
        self._credits[first] -= WHOLE
        return first

    def split(self, shares: Shares) -> None:
        """From now on these get the requests that name none. Where one of them is not here, the newest gets all."""
        self.shares = shares if all(share.version in self.numbers for share in shares) else ()
        self._credits = {share.version: 0 for share in self.shares}

    def add(self, version: int) -> None:
        """A version has proved itself."""
        self.numbers.append(version)
        self.numbers.sort()

    def discard(self, version: int) -> None:
        """Remove a version, if it exists."""
        if version in self.numbers:
            self.numbers.remove(version)
            if any(share.version == version for share in self.shares):
                self.split(())

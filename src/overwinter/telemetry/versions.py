"""The versions of functions as a reader of steps knows them."""

from overwinter.core import ids
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import FunctionName
from overwinter.core.versions import Shares, Versions


class KnownVersions:
    """All versions of all functions, and those that may serve requests without a version."""

    def __init__(self) -> None:
        self._specs: dict[FunctionName, dict[int, FunctionSpec]] = {}
        self._proven: dict[FunctionName, Versions] = {}

    def add(self, spec: FunctionSpec, proven: bool) -> None:
        """Add a version."""
        self._specs.setdefault(spec.name, {})[spec.version] = spec
        self._proven.setdefault(spec.name, Versions())
        if proven:
            self.prove(spec)

    def prove(self, spec: FunctionSpec) -> None:
        """A version has passed its trial, and may serve requests without a version from now on."""
        self._proven[spec.name].add(spec.version)

    def split(self, name: FunctionName, shares: Shares) -> None:
        """Set the shares of a function's versions, if it is known."""
        if name in self._proven:
            self._proven[name].split(shares)

    def discard(self, spec: FunctionSpec) -> None:
        """Remove a version."""
        del self._specs[spec.name][spec.version]
        self._proven[spec.name].discard(spec.version)
        if not self._specs[spec.name]:
            del self._specs[spec.name], self._proven[spec.name]

    def has(self, name: FunctionName) -> bool:
        """Whether there is any version of a function, or of a part of it."""
        return name in self._specs or any(ids.whole_name(each) == name for each in self._specs)

    def default(self, name: FunctionName) -> FunctionSpec | None:
        """Return the default version of a name; None if no version has passed its trial."""
        proven = self._proven.get(name)
        return self._specs[name][proven.default] if proven is not None and proven.numbers else None

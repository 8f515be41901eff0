"""What a node asks of the package that measures functions, which lies above it."""

from typing import Protocol

from overwinter.core.profile import Profile
from overwinter.core.profiling import Tell, Wanted
from overwinter.node.functions import DeployedFunction


class Profiles(Protocol):
    """Measures functions on this machine, and stores what was found."""

    def stored(self, function: DeployedFunction, /) -> Profile | None:
        """The stored profile of the function on this machine. Reads the disk."""
        ...

    async def measure(self, function: DeployedFunction, wanted: Wanted, tell: Tell, /) -> Profile:
        """Measure what is wanted and not known; CallerError, WorkerError."""
        ...

    def measure_soon(self, function: DeployedFunction, /) -> None:
        """Measure what its settings allow, in the background."""
        ...

"""The interface of the package that measures functions, which depends on this one."""

from typing import Protocol

from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileOptions, ReportProgress
from overwinter.node.functions import DeployedFunction


class Profiles(Protocol):
    """Measures functions on this machine, and stores the results."""

    def stored(self, function: DeployedFunction, /) -> Profile | None:
        """Return the stored profile of the function on this machine, otherwise that of its program alone, with the
        layers; None: neither was measured. Reads the disk.
        """
        ...

    async def known(self, function: DeployedFunction, /) -> Profile | None:
        """Return what `stored` returns; another thread reads the disk."""
        ...

    async def measure(self, function: DeployedFunction, options: ProfileOptions, report: ReportProgress, /) -> Profile:
        """Measure the configurations of `options`; known ones are skipped unless `options.again`."""
        ...

    def measure_soon(self, function: DeployedFunction, /) -> None:
        """Measure the unknown configurations of the default options, in the background."""
        ...

"""Decides when a node has recovered from an attack: CPU time and memory as before, and no function of the attack left.

CPU time is that of all its processes; the tenant's requests continue at the same rate as before the attacks.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from benchmarks.measure import cpu_seconds
from benchmarks.nodes import Node
from benchmarks.siege.peak_memory import estimated_bytes
from overwinter.core.errors import OverwinterError

CHECK_INTERVAL_S = 1.0
MOST_S = 20.0
"""The longest wait."""
FACTOR = 1.3
EXTRA_CORES = 0.05
EXTRA_BYTES = 256 << 20
"""The memory that the node may use beyond FACTOR times that of the calm phase, because zygotes stay for a while."""


class Recovery:
    """Compares a node after an attack with its calm phase, before the attacks."""

    def __init__(self, node: Node, keep: Sequence[str]) -> None:
        """Create it; `keep` are the functions that stay."""
        self._node = node
        self._keep = set(keep)
        self._cores = 0.0
        self._held = 0

    def learn(self, pause: Callable[[], None]) -> None:
        """Measure the calm phase while `pause` runs."""
        self._cores = self._cores_used(pause)
        self._held = estimated_bytes(self._node)

    def wait(self, pause: Callable[[float], None]) -> None:
        """Wait until the node is calm again, or MOST_S have passed."""
        until = monotonic() + MOST_S
        while monotonic() < until:
            cores = self._cores_used(lambda: pause(CHECK_INTERVAL_S))
            if 0 <= cores <= FACTOR * self._cores + EXTRA_CORES and self._is_clean():
                return

    def _cores_used(self, pause: Callable[[], None]) -> float:
        began, used = monotonic(), cpu_seconds(self._node.pids())
        pause()
        # The value is negative if processes ended that are no longer counted; that is not idle.
        return (cpu_seconds(self._node.pids()) - used) / (monotonic() - began)

    def _is_clean(self) -> bool:
        with suppress(OverwinterError, OSError):
            names = {each["name"] for each in self._node.client.functions()}
            return names <= self._keep and estimated_bytes(self._node) <= FACTOR * self._held + EXTRA_BYTES
        return False

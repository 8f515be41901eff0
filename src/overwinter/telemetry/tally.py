"""Counts for one function, updated while a scheduler's steps are read, live or simulated."""

from collections import Counter

from overwinter.core.actions import Start
from overwinter.core.ids import FunctionName, TenantId


class Tally:
    """Counts of one function, all its versions together. Seconds and bytes are of what has ended."""

    def __init__(self, name: FunctionName) -> None:
        self.name = name
        self.tenant: TenantId | None = None
        self.slo_s: float | None = None
        """Of the version that answers."""
        self.requests = self.answered = self.cancelled = 0
        self.within = 0
        """Answered within the SLO."""
        self.refused: Counter[str] = Counter()
        """By the error's name."""
        self.started: Counter[Start] = Counter()
        """Answered, by from where the function had to be woken."""
        self.crashes = self.evictions = 0
        self.wakes: Counter[Start] = Counter()
        """Workers started, by where the blocks were."""
        self.woken: Counter[Start] = Counter()
        """Of these, those that became ready."""
        self.wake_s: dict[Start, float] = {"host": 0.0, "disk": 0.0}
        """Seconds until they did."""
        self.binds = 0
        """In workers of its family, that ended, those that failed among them."""
        self.bind_s = 0.0
        """Their time."""
        self.loaded_bytes = 0
        self.core_s = 0.0
        """Of runs: their time on each of their cores, of which functions that share a run pay by their requests."""
        self.busy_s = self.worker_s = 0.0
        """Of workers: with something to run, and alive."""
        self.worker_core_s = 0.0
        """Cores of workers that were alive."""
        self.idle_core_s = 0.0
        """Cores of workers that were alive and ran nothing."""
        self.private_byte_s = 0.0
        """Private memory of workers over their time."""
        self.workers = 0
        """Alive now."""

    @property
    def ended(self) -> int:
        """Requests that were answered or refused."""
        return self.answered + self.refused.total()

    @property
    def attainment(self) -> float | None:
        """Share of the requests that ended that were answered within the SLO; None: no SLO, or no request."""
        return self.within / self.ended if self.slo_s is not None and self.ended else None

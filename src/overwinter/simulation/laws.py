"""Computes the latency and memory of every configuration from a few measured parameters.

It is for models whose profile follows from few facts: the time of one request on one core, three measured effects, and
the memory of a worker and of a request.
"""

import msgspec

Row = tuple[int, int, int, float, float]
"""The cores, batch, concurrency, latency in ms, and private MiB of a worker with this configuration."""


class LatencyLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latency l and the private memory m with c cores and p runs at once of b requests each, so that each run
    has k = c/p cores:

    l = alone · (1 + (b - 1)·(1 - batching)) · S(k) · (1 + crowding·(p - 1))
    S(k) = serial + (1 - serial)/k if k is at least 1 (Amdahl's law), 1/k if it is less
    m = runtime + request·b·p
    """

    alone_ms: float
    """The latency of a single request on one core."""
    serial: float
    """The share of a run that more cores do not shorten."""
    batching: float = 0.0
    """The time that each further request of a batch saves, as a share of a single request."""
    crowding: float = 0.05
    """The time that each further concurrent run adds to a run, besides the division of cores, as a share of it."""
    runtime_mib: float
    """The private memory of an idle worker."""
    request_mib: float
    """The private memory of each request in progress."""
    cores: tuple[int, ...] = (1, 2, 4, 8)
    batches: tuple[int, ...] = (1,)
    concurrencies: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        if min(self.alone_ms, self.runtime_mib) <= 0 or min(self.crowding, self.request_mib) < 0:
            raise ValueError(
                "alone_ms and runtime_mib must be greater than 0; crowding and request_mib must be at least 0"
            )
        if not (0 <= self.serial <= 1 and 0 <= self.batching < 1):
            bounds = "serial must be from 0 to 1, and batching at least 0 and less than 1"
            raise ValueError(f"{bounds}; got {self.serial} and {self.batching}")
        if not all(values and min(values) >= 1 for values in (self.cores, self.batches, self.concurrencies)):
            raise ValueError(
                "cores, batches and concurrencies must not be empty, and each of their values must be at least 1"
            )

    def rows(self) -> tuple[Row, ...]:
        """Every combination of cores, batch and concurrency."""
        return tuple(
            (c, b, p, self.latency_ms(c, b, p), self.runtime_mib + self.request_mib * b * p)
            for c in self.cores
            for b in self.batches
            for p in self.concurrencies
        )

    def latency_ms(self, cores: int, batch: int, concurrency: int) -> float:
        """Return the latency of a run of `batch` requests while `concurrency` runs are in progress."""
        share = cores / concurrency
        slowdown = self.serial + (1 - self.serial) / share if share >= 1 else 1 / share
        work = 1 + (batch - 1) * (1 - self.batching)
        return self.alone_ms * work * slowdown * (1 + self.crowding * (concurrency - 1))

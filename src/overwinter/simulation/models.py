"""Describes the functions of a scenario: their blocks, their times, and their requests."""

from math import inf

import msgspec

from overwinter.core.function import Settings
from overwinter.core.ids import FunctionName, TenantId, is_part
from overwinter.core.profile import LATENCY_BOUND, Point, Profile, between
from overwinter.simulation.laws import LatencyLaw, Row
from overwinter.simulation.workloads import Workload

MIB = 1 << 20
NUMBER_MAX = 1e12
"""The largest number of most fields: in bytes, too, it is finite, and can be counted."""


class ScenarioPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of most parts of a scenario."""

    def check_above(self, *names: str, least: float | None = None) -> None:
        """Raise ValueError unless these numbers are above 0 (at least `least`, if given) and at most NUMBER_MAX, or
        None.
        """
        for name in names:
            value = getattr(self, name)
            if value is not None and not ((value > 0 if least is None else value >= least) and value <= NUMBER_MAX):
                bound = "above 0" if least is None else f"at least {least}"
                raise ValueError(f"{name} must be {bound} and at most {NUMBER_MAX:g}, got {value}")


class Blocks(ScenarioPart, frozen=True, kw_only=True):
    """Some blocks of a function, all of the same size."""

    mib: float
    count: int = 1
    shared: str | None = None
    """A key: entries with the same key and block size, of any functions, have the same blocks. None: each copy has its
    own blocks.
    """
    work: float | None = None
    """The time of the calls that use each of them, relative to that of the function's other blocks; by default in
    proportion to their bytes. The time of the program is divided among its slices in this proportion.
    """

    def __post_init__(self) -> None:
        self.check_above("mib", "count", "work")


class HandlerModel(ScenarioPart, frozen=True, kw_only=True):
    """The handler of a function whose program may run on devices. It runs in a worker, before and after the program."""

    before_ms: dict[int, float]
    """The time before the call of the program by batch size; linear between and above the given sizes."""
    after_ms: dict[int, float] = {}
    """The time after it; none by default."""
    blocks: tuple[Blocks, ...] = ()
    """Its source and assets, which only workers need."""

    def before_s(self, batch: int) -> float:
        """Return the seconds before the program in a run of this many requests."""
        return between(sorted(self.before_ms.items()), batch) / 1000

    def after_s(self, batch: int) -> float:
        """Return the seconds after the program for this many requests."""
        return between(sorted(self.after_ms.items()), batch) / 1000 if self.after_ms else 0.0

    def __post_init__(self) -> None:
        if not self.before_ms:
            raise ValueError("before_ms needs a time for at least one batch size of 1 or more")
        for name, times in (("before_ms", self.before_ms), ("after_ms", self.after_ms)):
            if min(times, default=1) < 1 or not all(0 < time < inf for time in times.values()):
                raise ValueError(f"{name} needs batch sizes of at least 1, and finite times above 0")


class FunctionModel(ScenarioPart, frozen=True, kw_only=True):
    """A simulated function, and the number of its copies."""

    name: str
    variants: int = 1
    """The number of its copies, each with its own blocks unless they are shared."""
    blocks: tuple[Blocks, ...]
    """In the order of their use. If no device can hold all blocks of a function that may run on devices, its program is
    cut between blocks.
    """
    latency_ms: dict[int, float] = {}
    """The latency of one run by batch size; linear between and above the given sizes. With `device = "pool"` in the
    settings: on a device that has all blocks.
    """
    device_ms: dict[int, float] = {}
    """With `device = "any"` in the settings: the latency on a device that has all blocks; by default as in a worker."""
    profile: tuple[Row, ...] = ()
    """Replaces latency_ms: rows of cores, batch, concurrency, latency in ms, and private MiB of a worker with this
    configuration.
    """
    law: LatencyLaw | None = None
    """Replaces latency_ms and profile: the law from which the rows of a profile are computed."""
    serial: float | None = None
    """The share of a run that more cores do not shorten (Amdahl's law). With it, latency_ms is for one core, and
    workers may have any number of cores up to the function's threads.
    """
    gmacs: float = 1.0
    """Billions of multiply-accumulates of one request."""
    jitter: float = 0.0
    """The standard deviation of a run's time, as a share of it."""
    start_s: float = 0.02
    """The time from the fork until the worker is ready, on one core, for a program that the zygote has compiled."""
    prepare_s: float = 0.03
    """The further time of a start whose program the zygote has not compiled, and that of a preparation on a device."""
    bind_s: float = 0.002
    """The time to bind another function of the family in a worker, on one core."""
    swap_ms: float = 0.0
    """On a device: the further time of a run that brings blocks, besides that of its first group and the longer of its
    execution and its transfer.
    """
    worker_mib: float = 20.0
    """The private memory of a worker for which `profile` or `law` has no row."""
    has_handler: bool = False
    """Whether it has a handler. If its settings have a `device` other than "cpu", `handler` says so."""
    handler: HandlerModel | None = None
    """If its settings have a `device` other than "cpu": its handler, which runs in a worker and calls the program. The
    latencies above are those of the program.
    """
    tenant: TenantId = TenantId("simulated")
    """The owner. With `dedicated` in the settings, blocks are shared only with functions of this tenant."""
    settings: Settings = Settings()
    workload: Workload | None = None
    """The requests; None: they come from the applications of the scenario, which are pipelines."""

    def names(self) -> tuple[FunctionName, ...]:
        """Return the names of its copies."""
        if self.variants == 1:
            return (FunctionName(self.name),)
        return tuple(FunctionName(f"{self.name}-{index:04}") for index in range(self.variants))

    def relative_times(self) -> list[float]:
        """Return the relative time of each block's calls."""
        return [part.mib if part.work is None else part.work for part in self.blocks for _ in range(part.count)]

    def scheduler_profile(self) -> Profile:
        """The profile that the scheduler gets."""
        points = (Point(c, int(mib * MIB), b, p, latency / 1000) for c, b, p, latency, mib in self._rows())
        return Profile(
            weight_bytes=int(sum(part.mib * part.count for part in self.blocks) * MIB),
            macs=int(self.gmacs * 1e9),
            points=tuple(points),
            # A scenario may have starts that take no time, and a profile may not.
            wake_s=LATENCY_BOUND.nearest(self.start_s),
        )

    def on_device(self) -> "FunctionModel":
        """Return the model of the function as it runs on devices: without handler and workload."""
        measured = {"latency_ms": self.device_ms, "profile": (), "law": None, "serial": None} if self.device_ms else {}
        return msgspec.structs.replace(self, workload=None, device_ms={}, has_handler=False, handler=None, **measured)

    def _rows(self) -> tuple[Row, ...]:
        if self.profile or self.law is not None:
            return self.profile if self.law is None else self.law.rows()
        threads, known = self.settings.threads, sorted(self.latency_ms.items())
        if self.serial is None:
            return tuple((threads, batch, 1, latency, self.worker_mib) for batch, latency in known)
        return tuple(
            (cores, batch, 1, between(known, batch) * (self.serial + (1 - self.serial) / cores), self.worker_mib)
            for cores in range(1, threads + 1)
            for batch in range(1, self.settings.max_batch + 1)
        )

    def __post_init__(self) -> None:
        self.check_above("variants", "worker_mib", "gmacs")
        self.check_above("jitter", "start_s", "prepare_s", "bind_s", "serial", "swap_ms", least=0)
        if self.serial is not None and (self.serial > 1 or not self.latency_ms):
            raise ValueError(f"serial must be from 0 to 1 and needs latency_ms, got {self.serial}")
        if (bool(self.latency_ms), bool(self.profile), self.law is not None).count(True) != 1:
            raise ValueError("give one of latency_ms, profile and law")
        if self.latency_ms and (min(self.latency_ms) < 1 or min(self.latency_ms.values()) <= 0):
            raise ValueError(
                "latency_ms needs a time above 0 for at least one batch size, and only batch sizes of 1 or more"
            )
        if self.device_ms and (self.settings.device != "any" or min(*self.device_ms, *self.device_ms.values()) <= 0):
            raise ValueError('device_ms needs device = "any", batch sizes of 1 or more, and times above 0')
        if len({part.work is None for part in self.blocks}) > 1:
            raise ValueError("give the work of all blocks or of none")
        self._check_handler()
        self._check_profile()
        if not self.name or "@" in self.name or is_part(FunctionName(self.name)):
            raise ValueError(f"name must be a word without @ and :, got {self.name!r}")

    def _check_profile(self) -> None:
        if any(min(row) <= 0 for row in self.profile):
            raise ValueError("every number of a row of profile must be above 0")
        for *_, mib in self._rows():
            if not mib <= NUMBER_MAX:
                raise ValueError(f"a worker must have at most {NUMBER_MAX:g} MiB, got {mib:g}")
        fault = self.scheduler_profile().fault()
        if fault is not None:
            raise ValueError(f"its latencies and memory are not possible: {fault}")

    def _check_handler(self) -> None:
        device = self.settings.device
        if self.handler is not None and device == "cpu":
            raise ValueError('handler needs device = "pool" or "any": elsewhere latency_ms contains its time')
        if self.has_handler and self.handler is None and device != "cpu":
            raise ValueError(
                f'has_handler = true with device = "{device}" needs the times of the handler: give handler'
            )

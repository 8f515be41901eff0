"""Counts for one function, updated while a scheduler's steps are read, live or simulated."""

from collections import Counter
from collections.abc import Iterable

from overwinter.core.actions import Start
from overwinter.core.ids import DeviceId, FunctionId, FunctionName, TenantId


class DeviceCounts:
    """The ended runs on a device: those of one function, or all."""

    def __init__(self) -> None:
        self.hits = self.misses = 0
        """The runs whose blocks were all there, and those that brought missing bytes."""
        self.run_s = 0.0
        self.moved_bytes = 0
        self.peer_bytes = 0
        """The part of the moved bytes that came from other devices."""

    @property
    def runs(self) -> int:
        """The ended runs."""
        return self.hits + self.misses

    @property
    def hit_ratio(self) -> float | None:
        """The share of the runs that were hits; None: nothing ran."""
        return self.hits / self.runs if self.runs else None

    def add(self, missing_bytes: int, moved_bytes: int, peer_bytes: int, seconds: float) -> None:
        """Count a run."""
        if missing_bytes:
            self.misses += 1
        else:
            self.hits += 1
        self.moved_bytes += moved_bytes
        self.peer_bytes += peer_bytes
        self.run_s += seconds

    @staticmethod
    def sum(counts: "Iterable[DeviceCounts]") -> "DeviceCounts":
        """Return the sum."""
        total = DeviceCounts()
        for each in counts:
            total.hits += each.hits
            total.misses += each.misses
            total.run_s += each.run_s
            total.moved_bytes += each.moved_bytes
            total.peer_bytes += each.peer_bytes
        return total


class Tally:
    """The counts of one function, over all its versions.

    The costs of a run, a load or a bind are added when it has ended. The costs over time, of workers and of blocks on
    devices, are added when the function is charged for them: at the latest when it is unbound or its blocks leave.
    """

    def __init__(self, name: FunctionName) -> None:
        self.name = name
        self.tenant: TenantId | None = None
        self.default: FunctionId | None = None
        """The version that represents the name; None: none has passed its trial."""
        self.slo_s: float | None = None
        """The SLO of the default version."""
        self.requests = self.answered = self.cancelled = 0
        self.slo_requests = self.in_slo = 0
        """The requests that were answered or refused while the function had an SLO, and those answered within it."""
        self.refused: Counter[str] = Counter()
        """The refused requests, by the name of the error."""
        self.answered_by_start: Counter[Start] = Counter()
        """The answered requests, by the kind of start."""
        self.crashes = self.evictions = 0
        self.wakes: Counter[Start] = Counter()
        """The started workers, by the place of the blocks."""
        self.woken: Counter[Start] = Counter()
        """The started workers that became ready."""
        self.wake_s: dict[Start, float] = {"host": 0.0, "disk": 0.0}
        """The seconds of these wakes, with the loads of the blocks."""
        self.binds = 0
        """The ended binds in workers of its family, failed ones included."""
        self.bind_s = 0.0
        """The seconds of these binds."""
        self.loaded_bytes = 0
        self.core_s = 0.0
        """The core seconds of runs and binds; functions that share a run are charged by their number of requests."""
        self.busy_s = self.worker_s = 0.0
        """`busy_s`: the seconds in which its workers had something to run, divided among the functions of a run by
        requests. `worker_s`: the seconds in which they were alive. `worker_s` and the next three figures are divided
        equally among the functions of a worker.
        """
        self.worker_core_s = 0.0
        """The cores of its workers times the seconds in which they were alive."""
        self.idle_core_s = 0.0
        """The cores of its workers times the seconds in which they were idle."""
        self.private_byte_s = 0.0
        """The private memory of its workers times the seconds."""
        self.workers = 0
        """The current workers."""
        self.by_device: dict[DeviceId, DeviceCounts] = {}
        """Its runs on devices. What a shared run brings counts for the first of its functions only."""
        self.idle_device_s = 0.0
        """The time in which its versions were in the host store and did not run, if it is a function of the pool."""
        self.device_byte_s = 0.0
        """Its part of the blocks on devices, over time; counted when it no longer holds them."""
        self.devices_with_blocks = 0
        """The number of devices that hold blocks for a version, summed over its versions and their slices."""

    @property
    def on_devices(self) -> DeviceCounts:
        """Its runs on all devices together."""
        return DeviceCounts.sum(list(self.by_device.values()))

    @property
    def attainment(self) -> float | None:
        """The share of the requests that ended while it had an SLO and were answered within it; None: no SLO, or no
        such request.
        """
        return self.in_slo / self.slo_requests if self.slo_s is not None and self.slo_requests else None

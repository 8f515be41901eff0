"""Reads a scheduler's steps, simulated or live, and computes the figures of a report.

It needs only the events and actions.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from overwinter.core.actions import Drop, Reply, Run
from overwinter.core.events import Arrived, MemoryMeasured
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Address, FunctionName, Seconds, StoreName
from overwinter.core.profile import Profile
from overwinter.telemetry.in_progress import LiveWorker, OpenRequest, OpenRun
from overwinter.telemetry.latencies import Latencies
from overwinter.telemetry.pool import TrackedDevice
from overwinter.telemetry.tally import DeviceCounts, Tally
from overwinter.telemetry.tracking import Tracker

SAMPLES = 600
"""The number of intervals into which a curve divides the duration."""
SUMMED = (
    "requests",
    "answered",
    "refused",
    "cancelled",
    "answered_by_start",
    "wakes",
    "loaded_bytes",
    "worker_s",
    "busy_s",
    "worker_core_s",
    "core_s",
    "idle_device_s",
)
"""The figures that are summed for the total."""


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of the requests of an application, of a function, or of all functions together."""

    requests: int
    answered: int
    refused: dict[str, int]
    """The refused requests by the error's name; for an application, by that of the first stage that failed."""
    lost: int
    """The requests that were neither answered nor refused nor cancelled."""
    attainment: float | None
    """The share of the requests with an SLO that were answered within it; None: no request has one."""
    p50_ms: float | None
    p99_ms: float | None


class Figures(RequestFigures, frozen=True, kw_only=True):
    """The figures of one function, or of all functions together."""

    cancelled: int
    """The requests that were cancelled before the answer: the caller disconnected, or another stage of the application
    failed.
    """
    slo_ms: float | None = None
    """The SLO of one function."""
    answered_by_start: dict[str, int]
    """The answered requests, by the kind of start."""
    wakes: dict[str, int]
    """The started workers, by where the function's blocks were."""
    loaded_bytes: int
    worker_seconds: float
    """The time in which its workers were alive, divided equally among the functions of a worker."""
    busy_seconds: float
    """The time in which its workers had something to run, divided among the functions of a run by requests."""
    worker_core_s: float
    """The cores of its workers times the time in which they were alive, divided as `worker_seconds` is."""
    busy_core_s: float
    """The core seconds of its runs and binds. In the total, busy_core_s / worker_core_s is AsyFunc's CPU utility; for
    one function of a shared worker it can exceed 1.
    """
    device_seconds: float = 0.0
    """The time of its runs on devices."""
    idle_device_seconds: float = 0.0
    """The time in which it was in the host store and did not run on a device, if it is a function of the pool."""
    moved_bytes: int = 0
    """The bytes that were transferred to devices for its runs; those of a shared run count for its first function."""
    hit_ratio: float | None = None
    """The share of its runs on devices whose blocks were all there. A shared run always counts as such a run for each
    of its functions after the first. None: there was no run.
    """


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one device."""

    runs: int
    busy_share: float
    """The share of the time in which it ran something, with the transfers for which runs waited."""
    hit_ratio: float | None
    moved_bytes: int
    executors: int
    """The started executors."""
    crashes: int
    """The executors that died, whose device failed, or that were killed because a start or run did not end in time."""
    unplaced: int
    """The attempts of a run whose blocks did not fit, because the free memory of the device was not contiguous."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory in bytes over time; a block that many functions share counts once."""

    blocks_mean: float
    blocks_peak: int
    workers_mean: float
    workers_peak: float
    mean: float
    peak: float


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A point of the curves over time."""

    at_s: float
    workers: int
    blocks_bytes: int
    workers_bytes: float
    worker_cores: int
    """The cores of the live workers."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a simulation or a journal. `msgspec.json.encode` converts it to JSON."""

    duration_s: float
    total: Figures
    memory: Memory
    functions: dict[str, Figures]
    applications: dict[str, RequestFigures] = {}
    devices: dict[str, DeviceFigures] = {}
    samples: list[Sample]
    latencies: list[tuple[float, float]]
    """Pairs of seconds and the share of the answers up to them."""


class Outcomes(Tally):
    """The counts of one function or application, with the latencies of its answers."""

    def __init__(self, name: FunctionName) -> None:
        super().__init__(name)
        self.latencies = Latencies()

    def add(self, other: "Outcomes") -> None:
        """Add the counts in SUMMED, the runs on devices and the latencies of another."""
        for field in SUMMED:
            setattr(self, field, getattr(self, field) + getattr(other, field))
        for name, counts in other.by_device.items():
            self.by_device[name] = DeviceCounts.sum([self.by_device.get(name, DeviceCounts()), counts])
        self.latencies.merge([other.latencies])

    def request_figures(self) -> RequestFigures:
        """Return the counts of requests as data."""
        return RequestFigures(
            requests=self.requests,
            answered=self.answered,
            refused=dict(sorted(self.refused.items())),
            lost=self.requests - self.answered - self.cancelled - self.refused.total(),
            attainment=self.in_slo / self.requests if self.slo_s is not None and self.requests else None,
            p50_ms=_ms(self.latencies.quantile(0.5)),
            p99_ms=_ms(self.latencies.quantile(0.99)),
        )

    def figures(self) -> Figures:
        """Return all figures as data."""
        on_devices = self.on_devices
        return Figures(
            **msgspec.structs.asdict(self.request_figures()),
            cancelled=self.cancelled,
            slo_ms=_ms(self.slo_s),
            answered_by_start=dict(sorted(self.answered_by_start.items())),
            wakes=dict(sorted(self.wakes.items())),
            loaded_bytes=self.loaded_bytes,
            worker_seconds=self.worker_s,
            busy_seconds=self.busy_s,
            worker_core_s=self.worker_core_s,
            busy_core_s=self.core_s,
            device_seconds=on_devices.run_s,
            idle_device_seconds=self.idle_device_s,
            moved_bytes=on_devices.moved_bytes,
            hit_ratio=on_devices.hit_ratio,
        )


Worker = LiveWorker[Outcomes]


class StepReader(Tracker[Outcomes]):
    """Reads `(now, event, actions)` one after another. The memory of a worker is that in its function's profile for the
    largest batch that it has run; without a profile, what was measured. If workers share no weights, each has its own
    copy, and there is no host store.
    """

    def __init__(self, duration_s: float, shared: bool = True, settle_s: float = 0.0) -> None:
        """`settle_s`: requests that arrive earlier are not counted."""
        self._outcomes: dict[FunctionName, Outcomes] = {}
        """The outcomes of all deployed functions; the empty name has the requests and workers of no function."""
        super().__init__(self._outcomes_of)
        self.calls = Outcomes(FunctionName(""))
        self._shared = shared
        self._settle_s = settle_s
        self._settling = Outcomes(FunctionName(""))
        self._sizes: dict[Worker, deque[tuple[int, int]]] = {}
        """For each worker the measured batches with their memory, without those below the largest batch that it has
        run; the largest measured one always stays.
        """
        self._blocks: dict[StoreName, dict[Address, int]] = {}
        self._memory = MemoryCurve(duration_s / SAMPLES)
        self._action_handlers[Drop] = self._dropped
        self._event_handlers[MemoryMeasured] = self._memory_measured
        if settle_s:
            self._event_handlers[Arrived] = self._arrived_after_settling

    def _outcomes_of(self, name: FunctionName) -> Outcomes:
        return self._outcomes.setdefault(name, Outcomes(name))

    def _arrived_after_settling(self, event: Arrived, now: Seconds) -> None:
        if now < self._settle_s:
            asked = self.tallies.get(event.name)
            self._requests[event.request] = OpenRequest(self._settling, now, asked=asked)
        else:
            self._arrived(event, now)

    def _answered(self, tally: Outcomes, action: Reply, seconds: float, now: Seconds) -> None:
        tally.latencies.add(seconds)

    # Memory

    def _worker_started(self, worker: Worker, now: Seconds) -> None:
        sizes = self._sizes[worker] = _sizes(self.specs[worker.function].profile, worker, self._shared)
        self._memory.advance(now)
        self._memory.workers += 1
        self._memory.worker_cores += worker.cores
        self.set_memory(worker, sizes[0][1], now)

    def _run_started(self, worker: Worker, run: OpenRun[Outcomes], action: Run, now: Seconds) -> None:
        sizes = self._sizes[worker]
        if len(sizes) > 1 and run.batch > sizes[0][0]:
            while run.batch > sizes[0][0] and len(sizes) > 1:
                sizes.popleft()
            self.set_memory(worker, sizes[0][1], now)

    def _memory_measured(self, event: MemoryMeasured, now: Seconds) -> None:
        for id_, nbytes in event.taken:
            worker = self.workers.get(id_)
            # The version may have been removed before its worker ends.
            spec = None if worker is None else self.specs.get(worker.function)
            if worker is not None and spec is not None and spec.profile is None:
                self.set_memory(worker, nbytes, now)

    def set_memory(self, worker: Worker, nbytes: float, now: Seconds) -> None:
        """Set the private memory of the worker."""
        self._memory.advance(now)
        self._memory.workers_bytes += nbytes - worker.nbytes
        super().set_memory(worker, nbytes, now)

    def _worker_ended(self, worker: Worker, now: Seconds) -> None:
        del self._sizes[worker]
        self._memory.workers -= 1
        self._memory.worker_cores -= worker.cores

    def _blocks_held(self, spec: FunctionSpec, now: Seconds) -> None:
        if self._shared:
            blocks = self._blocks.setdefault(spec.store, {})
            new = {blob.address: blob.nbytes for blob in spec.blobs if blob.address not in blocks}
            blocks.update(new)
            self._memory.advance(now)
            self._memory.blocks_bytes += sum(new.values())

    def _dropped(self, action: Drop, now: Seconds) -> None:
        self._memory.advance(now)
        blocks = self._blocks.get(action.store, {})
        self._memory.blocks_bytes -= sum(blocks.pop(address, 0) for address in action.addresses)

    def latencies(self, names: Iterable[FunctionName]) -> Latencies:
        """Return the latencies of the answers of these functions together."""
        return Latencies().merge(self._outcomes_of(name).latencies for name in names)

    def report(self, now: Seconds) -> Report:
        """Return the figures at `now`, the end of the simulation or the journal."""
        self._memory.advance(now)
        for worker in self.workers.values():
            worker.charge_all(now)
        self.pool.charge_all(now)
        total = Outcomes(FunctionName(""))
        for tally in self._outcomes.values():
            total.add(tally)
        with_slo = [tally for tally in self._outcomes.values() if tally.slo_s is not None]
        asked, in_slo = sum(tally.requests for tally in with_slo), sum(tally.in_slo for tally in with_slo)
        attainment = in_slo / asked if asked else None
        return Report(
            duration_s=now,
            total=msgspec.structs.replace(total.figures(), attainment=attainment),
            memory=self._memory.figures(now),
            devices={name: _device_figures(each, now) for name, each in self.pool.devices.items()},
            functions={name: tally.figures() for name, tally in self._outcomes.items() if name},
            samples=self._memory.samples,
            latencies=total.latencies.shares(),
        )


class MemoryCurve:
    """The memory over time: its sum, its peak, and a curve of bounded length."""

    def __init__(self, every_s: float) -> None:
        self.workers = self.worker_cores = self.blocks_bytes = 0
        self.workers_bytes = 0.0
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._advanced_to = 0.0
        self._blocks_s = self._workers_s = 0.0
        self._blocks_peak = 0
        self._workers_peak = self._peak = 0.0

    def advance(self, now: float) -> None:
        """Account for the time up to now; call it before each change."""
        spent = now - self._advanced_to
        if spent > 0:
            self._blocks_s += spent * self.blocks_bytes
            self._workers_s += spent * self.workers_bytes
            self._blocks_peak = max(self._blocks_peak, self.blocks_bytes)
            self._workers_peak = max(self._workers_peak, self.workers_bytes)
            self._peak = max(self._peak, self.blocks_bytes + self.workers_bytes)
            self._advanced_to = now
        while len(self.samples) * self._every_s <= now:
            at = len(self.samples) * self._every_s
            self.samples.append(Sample(at, self.workers, self.blocks_bytes, self.workers_bytes, self.worker_cores))

    def figures(self, now: float) -> Memory:
        """Return the figures up to `now`."""
        seconds = now or 1.0
        return Memory(
            blocks_mean=self._blocks_s / seconds,
            blocks_peak=self._blocks_peak,
            workers_mean=self._workers_s / seconds,
            workers_peak=self._workers_peak,
            mean=(self._blocks_s + self._workers_s) / seconds,
            peak=self._peak,
        )


def _sizes(profile: Profile | None, worker: Worker, shared: bool) -> deque[tuple[int, int]]:
    """Return the memory of a worker of this configuration by the measured batches, ascending."""
    if profile is None:
        return deque([(1, 0)])
    measured = profile.worker_bytes(worker.cores, worker.concurrency) or {1: 0}
    own = 0 if shared else profile.weight_bytes
    return deque((batch, nbytes + own) for batch, nbytes in measured.items())


def _device_figures(device: TrackedDevice[Outcomes], seconds: float) -> DeviceFigures:
    counts = device.counts
    return DeviceFigures(
        runs=counts.runs,
        busy_share=counts.run_s / (seconds or 1.0),
        hit_ratio=counts.hit_ratio,
        moved_bytes=counts.moved_bytes,
        executors=device.starts,
        crashes=device.crashes,
        unplaced=device.unplaced,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000

"""The resources of a simulated node that delay work: cores, workers, the disk, the zygote, the size of the
host store.
"""

from collections.abc import Iterable
from functools import partial
from heapq import heappop, heappush

import msgspec

from overwinter.core.actions import StartWorker
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Address, FunctionId, StoreName
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.timeline import Callback, Timeline

SAME_S = 1e-6
"""Times that differ by less are equal: rounding errors must not keep a job from ending."""


class Job(msgspec.Struct, eq=False):
    """Work that takes some seconds on some cores, if it does not share them, and what follows it."""

    cores: int
    seconds: float
    among: "dict[Job, None]"
    """The jobs in progress of its process."""
    then: Callback
    ends: float = 0.0
    gone: bool = False
    """Whether it has ended or was cancelled."""


class Cores:
    """Cores that all jobs share as under a kernel: when jobs need more cores than there are, all proceed at the same
    lower speed. Work is measured on a separate clock that runs at that speed; on it each job has a fixed end.
    """

    def __init__(self, count: int, timeline: Timeline) -> None:
        self.count = count
        self.demand = 0
        self._timeline = timeline
        self._work = self._settled_at = 0.0
        self._speed = 1.0
        self._jobs: list[tuple[float, int, Job]] = []
        self._sequence = 0

    def submit(self, job: Job) -> None:
        """Begin a job now."""
        job.among[job] = None
        job.cores = min(job.cores, self.count)
        self._settle()
        job.ends = self._work + job.seconds
        self._sequence += 1
        heappush(self._jobs, (job.ends, self._sequence, job))
        shared = self._speed < 1.0
        self._change_demand(job.cores)
        if not shared and self._speed == 1.0:
            self._timeline.after(job.seconds, partial(self._end_if_done, job))

    def cancel(self, job: Job) -> None:
        """Cancel a job whose process died: free its cores, and drop its result."""
        if not job.gone:
            self._settle()
            job.gone = True
            self._change_demand(-job.cores)

    def _settle(self) -> None:
        """Account for the work done up to now."""
        now = self._timeline.now
        self._work += (now - self._settled_at) * self._speed
        self._settled_at = now

    def _change_demand(self, cores: int) -> None:
        """Add this many cores to the demand. While cores are lacking, the speed changes with every job, so only the
        next end is scheduled.
        """
        self.demand += cores
        while self._jobs and self._jobs[0][2].gone:
            heappop(self._jobs)
        before, self._speed = self._speed, self.count / self.demand if self.demand > self.count else 1.0
        if self._speed < 1.0:
            next_ends, _, job = self._jobs[0]
            self._timeline.after(max(0.0, next_ends - self._work) / self._speed, partial(self._end_if_done, job))
        elif before < 1.0:
            for ends, _, job in sorted(self._jobs):
                if not job.gone:
                    self._timeline.after(max(0.0, ends - self._work), partial(self._end_if_done, job))

    def _end_if_done(self, job: Job) -> None:
        """End a job, unless the cores have become slower since its end was scheduled."""
        if job.gone:
            return
        self._settle()
        if job.ends <= self._work + SAME_S:
            job.gone = True
            self._change_demand(-job.cores)
            del job.among[job]
            job.then()


class SimulatedWorker:
    """A simulated worker process: its function, its configuration, and its work."""

    __slots__ = ("concurrency", "cores", "function", "jobs", "run_cores", "worker")

    def __init__(self, action: StartWorker, function: SimulatedFunction) -> None:
        self.worker = action.worker
        self.function = function
        self.cores = action.cores
        self.concurrency = action.concurrency
        self.run_cores = max(1, action.cores // action.concurrency)
        self.jobs: dict[Job, None] = {}
        """The jobs in progress, in the order of their starts."""


class SerialResource:
    """A resource that serves one job after another: a disk, a zygote."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Return the time at which a job of this many seconds, submitted now, ends."""
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at

    def close_until(self, time: float) -> None:
        """Serve no job before `time`. Earlier jobs no longer delay later ones; the caller drops them."""
        self._free_at = time


class HostBlocks:
    """The blocks in the host stores, each once per store, and those being loaded."""

    def __init__(self, budget_bytes: float | None) -> None:
        self._budget = budget_bytes
        self._sizes: dict[StoreName, dict[Address, int]] = {}
        self._coming: dict[StoreName, dict[Address, float]] = {}
        """When each block that is being loaded will be present. Blocks loaded since the last check are included."""
        self._whole: dict[FunctionId, int] = {}
        """The functions whose blocks were all present, with the number of drops at that time."""
        self._drops = 0
        self.nbytes = 0

    def missing(self, spec: FunctionSpec) -> dict[Address, int]:
        """The sizes of a function's blocks that are neither in its store nor being loaded."""
        sizes = self._sizes.setdefault(spec.store, {})
        return {blob.address: blob.nbytes for blob in spec.blobs if blob.address not in sizes}

    def fits(self, blocks: dict[Address, int]) -> bool:
        """Whether these blocks fit in addition to the current ones."""
        return self._budget is None or self.nbytes + sum(blocks.values()) <= self._budget

    def add(self, blocks: dict[Address, int], store: StoreName, ready_at: float) -> None:
        """Add blocks that are being loaded until `ready_at`."""
        self._sizes.setdefault(store, {}).update(blocks)
        self._coming.setdefault(store, {}).update(dict.fromkeys(blocks, ready_at))
        self.nbytes += sum(blocks.values())

    def ready_at(self, spec: FunctionSpec, now: float) -> float:
        """Return when the last of a function's blocks is loaded; `now` if none is being loaded."""
        coming = self._coming.get(spec.store)
        if not coming:
            return now
        for address in [address for address, at in coming.items() if at <= now]:
            del coming[address]
        return max((coming[blob.address] for blob in spec.blobs if blob.address in coming), default=now)

    def holds(self, spec: FunctionSpec, now: float) -> bool:
        """Whether all blocks of a function are loaded."""
        if self._whole.get(spec.id) == self._drops:
            return True
        whole = not self.missing(spec) and self.ready_at(spec, now) <= now
        if whole:
            self._whole[spec.id] = self._drops
        return whole

    def drop(self, addresses: Iterable[Address], store: StoreName) -> None:
        """Remove these blocks, loaded or not."""
        self._drops += 1
        sizes, coming = self._sizes.setdefault(store, {}), self._coming.get(store, {})
        for address in addresses:
            self.nbytes -= sizes.pop(address, 0)
            coming.pop(address, None)

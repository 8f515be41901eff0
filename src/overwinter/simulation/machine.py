"""What holds work up on a modelled node: cores, the disk, the zygote, the host store's size."""

from collections import deque
from collections.abc import Iterable

from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Address, FunctionId, StoreName
from overwinter.simulation.timeline import Deed, Timeline


class Job:
    """Work that keeps some cores for some seconds, and what follows it."""

    __slots__ = ("cores", "done", "gone", "runs", "seconds")

    def __init__(self, cores: int, seconds: float, done: Deed) -> None:
        self.cores = cores
        self.seconds = seconds
        self.done = done
        self.runs = False
        self.gone = False


class Cores:
    """A bounded number of cores: jobs get theirs in the order they came, and keep them until they are done."""

    def __init__(self, count: int, timeline: Timeline) -> None:
        self.count = count
        self.free = count
        self._timeline = timeline
        self._waiting: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        """Run a job now, or as soon as those before it leave room."""
        job.cores = min(job.cores, self.count)
        if self._waiting or job.cores > self.free:
            self._waiting.append(job)
        else:
            self._begin(job)

    def cancel(self, job: Job) -> None:
        """Whoever did it died: its cores are free, and nothing follows."""
        if job.gone:
            return
        job.gone = True
        if job.runs:
            self.free += job.cores
            self._refill()

    def _begin(self, job: Job) -> None:
        self.free -= job.cores
        job.runs = True
        self._timeline.after(job.seconds, lambda: self._end(job))

    def _end(self, job: Job) -> None:
        if job.gone:
            return
        job.gone = True
        self.free += job.cores
        job.done()
        self._refill()

    def _refill(self) -> None:
        while self._waiting and (self._waiting[0].gone or self._waiting[0].cores <= self.free):
            job = self._waiting.popleft()
            if not job.gone:
                self._begin(job)


class Queue:
    """Something that does one thing after another: a disk, a zygote."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When work of so many seconds, asked for now, will be done."""
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at

    def closed_until(self, time: float) -> None:
        """Nothing is done before `time`; what was waiting is forgotten."""
        self._free_at = time


class HostBlocks:
    """The blocks in the host stores, each once in each store, and those on their way from disk."""

    def __init__(self, budget_bytes: float | None) -> None:
        self._budget = budget_bytes
        self._sizes: dict[StoreName, dict[Address, int]] = {}
        self._coming: dict[StoreName, dict[Address, float]] = {}
        """When those that were on their way at the last look will be there."""
        self._whole: dict[FunctionId, int] = {}
        """Functions whose blocks were all there after so many drops."""
        self._drops = 0
        self.nbytes = 0

    def missing(self, spec: FunctionSpec) -> dict[Address, int]:
        """The sizes of a function's blocks that neither lie in its store nor come."""
        sizes = self._sizes.setdefault(spec.store, {})
        return {blob.address: blob.nbytes for blob in spec.blobs if blob.address not in sizes}

    def has_room(self, blocks: dict[Address, int]) -> bool:
        """Whether these would fit beside what is there."""
        return self._budget is None or self.nbytes + sum(blocks.values()) <= self._budget

    def add(self, blocks: dict[Address, int], store: StoreName, ready_at: float) -> None:
        """These are on their way and will be there at `ready_at`."""
        self._sizes.setdefault(store, {}).update(blocks)
        self._coming.setdefault(store, {}).update(dict.fromkeys(blocks, ready_at))
        self.nbytes += sum(blocks.values())

    def ready_at(self, spec: FunctionSpec, now: float) -> float:
        """When the last of a function's blocks that are coming will be there; the past when none is."""
        coming = self._coming.get(spec.store)
        if not coming:
            return now
        for address in [address for address, at in coming.items() if at <= now]:
            del coming[address]
        return max((coming[blob.address] for blob in spec.blobs if blob.address in coming), default=now)

    def holds(self, spec: FunctionSpec, now: float) -> bool:
        """Whether all blocks of a function lie there."""
        if self._whole.get(spec.id) == self._drops:
            return True
        whole = not self.missing(spec) and self.ready_at(spec, now) <= now
        if whole:
            self._whole[spec.id] = self._drops
        return whole

    def drop(self, addresses: Iterable[Address], store: StoreName) -> None:
        """Forget these, there or on their way."""
        self._drops += 1
        sizes, coming = self._sizes.setdefault(store, {}), self._coming.get(store, {})
        for address in addresses:
            self.nbytes -= sizes.pop(address, 0)
            coming.pop(address, None)

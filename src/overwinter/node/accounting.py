"""Compares the scheduler's counts of bytes with the kernel's.

Periodically, the tables of the scheduler and of the host stores are compared with the files of the tmpfs, and the
expected memory of workers with their actual memory. A thread reads the files while the node continues, so a difference
counts only if it is found in two consecutive passes. The log gets one line for all new differences of a kind.

About every second, some workers are measured between two comparisons: those that may have copied many of the pages
which they shared with their zygote, and those whose zygote has dropped programs.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from overwinter.core.ids import Address, Seconds, StoreName, WorkerId
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.memory import PAGE_BYTES, directory_memory, process_memory
from overwinter.node.process_stat import MINOR_FAULTS, stat_field
from overwinter.node.processes import Processes
from overwinter.scheduler.memory import SLACK, SLACK_BYTES
from overwinter.scheduler.published import NO_BLOCKS, Published, StoreBlocks
from overwinter.store.host import page_bytes
from overwinter.store.hosts import HostStores
from overwinter.telemetry.accounts import (
    KINDS,
    Accounts,
    FileMemory,
    Kind,
    MeasuredWorkerMemory,
    ProcessMemory,
    StoreView,
)
from overwinter.telemetry.statistics import Statistics

MEASURED_MAX = 16
"""The most workers that are measured in one comparison, those measured longest ago first, because each costs
milliseconds. This limit does not apply to zygotes.
"""
COPIES_EVERY_S = 1.0
"""How often the node looks for workers that may have copied many pages which they shared with their zygote."""
COPIED_BYTES = 64 << 20
"""A worker that may have copied more than this since `measure_copies` last measured it is measured again."""
COPIES_MEASURED_MAX = 8
"""The most workers that `measure_copies` measures at once."""
MAPPINGS_MAX = 16_384
"""The most mappings of a worker in addition to its blocks. A fresh worker has about a thousand. Each mapping takes
memory of the kernel, and makes a measurement longer.
"""


class Mismatch(NamedTuple):
    """One difference between two counts."""

    kind: Kind
    what: Address | WorkerId
    text: str


class _PageFaults(NamedTuple):
    """The page faults of a worker. Only the measurements of `measure_copies` count here, not those of `compare`."""

    cpu_time_s: float = -1.0
    """Its CPU time when they were last counted."""
    counted: int = 0
    """How many there were when they were last counted."""
    measured: int = 0
    """How many there were at its last measurement."""
    dropped_by_zygote: int = 0
    """How many programs its zygote had dropped by then."""
    turn: int = 0
    """The number of that measurement."""


class Accounting:
    """Compares counts. Used on the event loop's thread only."""

    def __init__(
        self,
        published: Published,
        hosts: HostStores,
        processes: Processes,
        statistics: Statistics,
        log: Callable[[str], None],
    ) -> None:
        self._published = published
        self._hosts = hosts
        self._processes = processes
        self._statistics = statistics
        self._log = log
        self._suspected: set[Mismatch] = set()
        self._confirmed: set[Mismatch] = set()
        self._page_faults: dict[WorkerId, _PageFaults] = {}
        self._turn = 0
        """The number of the last measurement of workers that may have copied pages."""
        self.accounts = Accounts()

    async def run(self, every_s: float, faults: Faults) -> None:
        """Compare periodically, without end."""
        last = clock.now()
        while True:
            await asyncio.sleep(min(every_s, COPIES_EVERY_S))
            with faults.contained("accounts"):
                if clock.now() - last >= every_s:
                    await self.compare()
                    last = clock.now()
                else:
                    await self.measure_copies()

    async def measure_copies(self) -> None:
        """Measure workers that may have copied many pages, or whose zygote has dropped programs, since this method
        last measured them. The one measured longest ago is first: a worker that copies pages all the time must not
        delay the others.
        """
        smaps = self._processes.worker_smaps()
        self._page_faults = {worker: self._page_faults_of(worker) for worker in smaps}
        copied = {worker: each.counted - each.measured for worker, each in self._page_faults.items()}
        dropped = {process.worker: process.dropped_by_zygote for process in self._processes.workers()}
        due = [
            worker
            for worker, pages in copied.items()
            if pages * PAGE_BYTES > COPIED_BYTES or dropped[worker] > self._page_faults[worker].dropped_by_zygote
        ]
        due = sorted(due, key=lambda worker: self._page_faults[worker].turn)[:COPIES_MEASURED_MAX]
        if not due:
            return
        self._turn += 1
        for worker in due:
            known = self._page_faults[worker]
            self._page_faults[worker] = known._replace(
                measured=known.counted, turn=self._turn, dropped_by_zygote=dropped[worker]
            )
        limits = [self._mappings_max(worker) for worker in due]
        files = deque((_duplicate(smaps[worker]), limit) for worker, limit in zip(due, limits, strict=True))
        try:
            measured = await asyncio.to_thread(_measure, files)
        finally:
            for file, _ in _take_each(files):
                file.close()
        for worker, memory, limit in zip(due, measured, limits, strict=True):
            if memory is not None:
                self._update(worker, memory, limit)

    def _mappings_max(self, worker: WorkerId) -> int:
        """Return how many mappings a worker may have."""
        process = self._processes.process(worker)
        return MAPPINGS_MAX + (0 if process is None else process.bindings.block_count)

    def _page_faults_of(self, worker: WorkerId) -> _PageFaults:
        """Count a worker's page faults, if it has computed since the last time and may copy many pages."""
        known, process = self._page_faults.get(worker, _PageFaults()), self._processes.process(worker)
        if process is None or process.pid is None or process.inherited_bytes <= COPIED_BYTES:
            return known
        cpu_time_s = clock.cpu_time_s(process.pid)
        if cpu_time_s is None or cpu_time_s == known.cpu_time_s:
            return known
        return known._replace(cpu_time_s=cpu_time_s, counted=stat_field(process.pid, MINOR_FAULTS))

    async def compare(self) -> None:
        """Compare once."""
        due = self._due()
        # Duplicates, because the node closes its descriptor when a worker ends, while the thread may still read.
        limits = [self._mappings_max(worker) for worker in due]
        zygotes = [(_duplicate(smaps), MAPPINGS_MAX) for smaps in self._processes.zygote_smaps()]
        files = deque([*zip(map(_duplicate, due.values()), limits, strict=True), *zygotes])
        blocks = self._published.stores()
        # The stores change during the comparison, so only a difference that is seen twice counts.
        try:
            stores, measured = await asyncio.to_thread(lambda: (self._view_stores(blocks), _measure(files)))
        finally:
            # If the node stops before the thread begins, the thread closes none of them.
            for smaps, _ in _take_each(files):
                smaps.close()
        now, profiled, accounts = clock.now(), self._published.profiled_memory(), self.accounts
        for worker, memory, limit in zip(due, measured, limits, strict=False):
            known = profiled.get(worker)
            if known is None or memory is None:
                continue
            if not self._update(worker, memory, limit):
                continue
            accounts.workers[worker] = MeasuredWorkerMemory(known.function, memory, known.profiled_bytes, now)
            if worker in self._statistics.workers:
                self._statistics.set_memory(self._statistics.workers[worker], float(memory.private), now)
        accounts.workers = {worker: process for worker, process in accounts.workers.items() if worker in profiled}
        accounts.zygotes = sum(memory.pss for memory in measured[len(due) :] if memory is not None)
        accounts.stores = stores
        accounts.passes += 1
        self._count_lasting({*_store_mismatches(stores), *_worker_mismatches(accounts.workers)})

    def _update(self, worker: WorkerId, memory: ProcessMemory, mappings_max: int) -> bool:
        """Update the memory that the worker still shares with its zygote: at most what it shared at its fork. If the
        zygote has dropped programs since the fork, some of it may be shared with other workers only, and each of these
        workers counts a part. Stop a worker with too many mappings, of which only a part was measured. Return whether
        the measurement was used.
        """
        process = self._processes.process(worker)
        if process is None or process.dismissed:
            return False
        if memory.mappings > mappings_max:
            self._processes.forks.give_up(process, f"it had more than {mappings_max} mappings")
            return False
        if process.dropped_by_zygote:
            # Mappings may be moved while they are read, and counted twice.
            process.inherited_bytes = min(process.inherited_at_fork_bytes, memory.others)
        else:
            process.inherited_bytes = min(process.inherited_bytes, memory.inherited)
        return True

    def _due(self) -> dict[WorkerId, int]:
        """Return the workers to measure in this pass, each with the descriptor of its smaps."""
        profiled = self._published.profiled_memory()
        smaps = {worker: fd for worker, fd in self._processes.worker_smaps().items() if worker in profiled}
        last = {worker: process.at for worker, process in self.accounts.workers.items()}
        due = sorted(smaps, key=lambda worker: last.get(worker, Seconds(0.0)))[:MEASURED_MAX]
        return {worker: smaps[worker] for worker in due}

    def _view_stores(self, blocks: Mapping[StoreName, StoreBlocks]) -> dict[StoreName, StoreView]:
        return {
            name: StoreView(host.resident(), directory_memory(host.root), *blocks.get(name, NO_BLOCKS))
            for name, host in self._hosts.every().items()
        }

    def _count_lasting(self, found: set[Mismatch]) -> None:
        """Count and log the mismatches that the previous pass found too, and the one before did not."""
        lasting = found & self._suspected
        new = lasting - self._confirmed
        self._suspected, self._confirmed = found, lasting
        for kind, meaning in KINDS.items():
            of_kind = [mismatch for mismatch in new if mismatch.kind == kind]
            self.accounts.mismatches[kind] += len(of_kind)
            if of_kind:
                more = "" if len(of_kind) == 1 else f", and {len(of_kind) - 1} more"
                self._log(f"{meaning} do not agree: {min(of_kind, key=lambda each: each.text).text}{more}")


def _duplicate(fd: int) -> BinaryIO:
    """Return a file object with a duplicate of the descriptor."""
    return open(os.dup(fd), "rb", buffering=0)


def _take_each(files: deque[tuple[BinaryIO, int]]) -> Iterator[tuple[BinaryIO, int]]:
    """Take the files one by one; only one thread gets each file."""
    with suppress(IndexError):
        while True:
            yield files.popleft()


def _measure(files: deque[tuple[BinaryIO, int]]) -> list[ProcessMemory | None]:
    measured = []
    for smaps, mappings_max in _take_each(files):
        with smaps:
            measured.append(process_memory(smaps, mappings_max))
    return measured


def _store_mismatches(stores: Mapping[StoreName, StoreView]) -> Iterator[Mismatch]:
    for name, view in stores.items():
        where = f"in the store of {name}" if name else "in the shared store"
        for address in view.resident.keys() | view.files.keys():
            message = _file_text(view.resident.get(address), view.files.get(address))
            if message is not None:
                yield Mismatch("files", address, f"block {address} {where} {message}")
        if view.settled:
            for address in view.resident.keys() ^ view.held.keys():
                message = "is held by the scheduler alone" if address in view.held else "is held for no function"
                yield Mismatch("blocks", address, f"block {address} {where} {message}")


def _file_text(nbytes: int | None, file: FileMemory | None) -> str | None:
    if nbytes is None:
        return "is a file that the store does not know"
    if file is None:
        return "has no file"
    if file.nbytes != nbytes:
        return f"has {file.nbytes} bytes, not {nbytes}"
    if file.allocated < page_bytes(nbytes):
        return f"has {file.allocated} bytes allocated, for a size of {nbytes} bytes"
    return None


def _worker_mismatches(workers: Mapping[WorkerId, MeasuredWorkerMemory]) -> Iterator[Mismatch]:
    for worker, process in workers.items():
        if process.expected is not None and process.memory.private > process.expected * SLACK + SLACK_BYTES:
            message = (
                f"worker {worker} of {process.function} was measured to need {process.expected} bytes, and has more"
            )
            yield Mismatch("workers", worker, message)

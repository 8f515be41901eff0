"""Reads a node's journal: when each device ran, what was brought to it, and what was evicted from it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import NamedTuple

import msgspec

from benchmarks.fault_injection import Span
from overwinter.core.actions import RunOnDevice, StartExecutor
from overwinter.core.events import RunEnded, WorkerExited
from overwinter.core.ids import DeviceId, RunId, Seconds
from overwinter.core.journal import read_journal


class DeviceRun(NamedTuple):
    """A run on a device that ended."""

    device: DeviceId
    began: Seconds
    ended: Seconds
    moved_bytes: int
    evicted: int
    unplaced: bool
    peer_bytes: int = 0


class Readings(msgspec.Struct):
    """What the devices of a node did."""

    runs: list[DeviceRun] = []
    executors: int = 0
    """The executors that were started."""
    exits: int = 0
    """The executors that ended."""

    def within(self, span: Span) -> "Readings":
        """Return the runs of a period, with the counts of the whole journal."""
        runs = [run for run in self.runs if span.begin <= run.began <= span.until]
        return Readings(runs, self.executors, self.exits)

    @property
    def moved_bytes(self) -> int:
        """The bytes that were brought to devices."""
        return sum(run.moved_bytes for run in self.runs)

    @property
    def swaps(self) -> int:
        """The runs that brought blocks."""
        return sum(run.moved_bytes > 0 for run in self.runs)

    @property
    def counts(self) -> Counter[str]:
        """Count what happened, for a table."""
        return Counter(
            {
                "runs on devices": len(self.runs),
                "runs that brought blocks": self.swaps,
                "runs that copied blocks from another device": sum(run.peer_bytes > 0 for run in self.runs),
                "functions evicted from devices": sum(run.evicted for run in self.runs),
                "runs whose blocks were not placed": sum(run.unplaced for run in self.runs),
                "executors started": self.executors,
                "executors ended": self.exits,
            }
        )

    def busy_s(self, devices: Sequence[DeviceId]) -> list[float]:
        """Return for each device the seconds in which it ran."""
        return [sum(run.ended - run.began for run in self.runs if run.device == device) for device in devices]


def read(journal: Path) -> Readings:
    """Read a whole journal."""
    found = Readings()
    open_runs: dict[RunId, tuple[Seconds, RunOnDevice]] = {}
    executors = set()
    with journal.open("rb") as file:
        for entry in read_journal(file)[1]:
            event = entry.event
            if isinstance(event, RunEnded) and event.run in open_runs:
                began, action = open_runs.pop(event.run)
                moved = event.moved_bytes, len(action.evict), event.unplaced, event.peer_bytes
                found.runs.append(DeviceRun(action.device, began, entry.now, *moved))
            elif isinstance(event, WorkerExited):
                found.exits += event.worker in executors
            for action in entry.actions:
                if isinstance(action, RunOnDevice):
                    open_runs[action.run] = entry.now, action
                elif isinstance(action, StartExecutor):
                    executors.add(action.executor)
    found.executors = len(executors)
    return found


def variance(loads: Sequence[float]) -> float:
    """Return the variance of the devices' loads, relative to the largest one (Torpor, fig. 9 and 14)."""
    most = max(loads)
    return pvariance([load / most for load in loads]) if most else 0.0


def mean_load(loads: Sequence[float], seconds: float) -> float:
    """Return the mean share of the time in which a device ran."""
    return fmean(loads) / seconds

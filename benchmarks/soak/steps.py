"""Reads a node's journal: when it had a free core, and whether a fresh scheduler makes the same decisions."""

from collections import Counter
from math import inf
from pathlib import Path

from benchmarks.fault_injection import Span
from overwinter.core.actions import Action, Bind, Run, RunOnDevice, StartExecutor, StartWorker
from overwinter.core.journal import read_journal
from overwinter.scheduler.scheduler import Scheduler

FREE_SHARE_MAX = 0.1
"""The part of a request's waiting time for which a core may be free. With more, the request need not have waited."""


class JournalSteps:
    """The content of a journal. RuntimeError at the first step that a fresh scheduler decides differently."""

    def __init__(self, journal: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._free: list[Span] = []
        """The periods in which not all cores were claimed."""
        since: float | None = None
        with journal.open("rb") as file:
            config, entries = read_journal(file)
            scheduler = Scheduler(config)
            cores = scheduler.cycle.resources.cores
            for number, entry in enumerate(entries):
                actions = tuple(scheduler.handle(entry.event, entry.now))
                if actions != entry.actions:
                    raise RuntimeError(f"step {number}, {entry.event}: {actions} in place of {entry.actions}")
                self.counts["steps"] += 1
                for action in actions:
                    self._count(action)
                if not cores.free and since is not None:
                    self._free.append(Span(since, entry.now))
                since = (entry.now if since is None else since) if cores.free else None
        if since is not None:
            self._free.append(Span(since, inf))

    def overloaded(self, span: Span) -> bool:
        """Whether all cores were claimed for nearly all of that time."""
        met = [each for each in self._free if each.overlaps(span)]
        free_s = sum(min(each.until, span.until) - max(each.begin, span.begin) for each in met)
        return free_s <= FREE_SHARE_MAX * (span.until - span.begin)

    def _count(self, action: Action) -> None:
        match action:
            case Run(functions=functions):
                self.counts["runs"] += 1
                if functions:
                    self.counts["runs that several functions shared"] += 1
                    self.counts["requests in shared runs"] += len(functions)
            case Bind():
                self.counts["binds"] += 1
            case StartWorker():
                self.counts["workers started"] += 1
            case StartExecutor():
                self.counts["executors started"] += 1
            case RunOnDevice(missing_bytes=missing, evict=evicted):
                self.counts["runs on devices"] += 1
                self.counts["runs that brought blocks"] += missing > 0
                self.counts["functions evicted from devices"] += len(evicted)
            case _:
                pass

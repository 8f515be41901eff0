"""What did a node's scheduler do in all that time, when had it a core to give, and does it do the same again?"""

from collections import Counter
from math import inf
from pathlib import Path

from benchmarks.harm import Span
from overwinter.core.actions import Action, Bind, Run, StartWorker
from overwinter.core.journal import read_journal
from overwinter.scheduler.scheduler import Scheduler

FREE = 0.1
"""Of the time for which a request waits: with a core to give for longer than that, it need not have waited."""


class Steps:
    """What is in a journal. RuntimeError at the first step that a fresh scheduler does otherwise."""

    def __init__(self, journal: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._free: list[Span] = []
        """When not all cores were taken."""
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
        """Whether all cores were taken for nearly all of that time."""
        met = [each for each in self._free if each.meets(span)]
        free_s = sum(min(each.until, span.until) - max(each.begin, span.begin) for each in met)
        return free_s <= FREE * (span.until - span.begin)

    def _count(self, action: Action) -> None:
        match action:
            case Run(functions=functions):
                self.counts["runs"] += 1
                if functions:
                    self.counts["runs that several functions shared"] += 1
                    self.counts["requests in those"] += len(functions)
            case Bind():
                self.counts["binds"] += 1
            case StartWorker():
                self.counts["workers started"] += 1
            case _:
                pass

"""Derives the parameters of a simulation of a machine from a node's journal."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.measure import MIB
from overwinter.core.actions import LoadBlocks, Run, StartWorker
from overwinter.core.events import Arrived, BlocksLoaded, RunEnded
from overwinter.core.function import Settings
from overwinter.core.ids import FunctionId, RunId, Seconds, WorkerId
from overwinter.core.journal import Entry
from overwinter.core.profile import Profile
from overwinter.simulation.models import Blocks, FunctionModel
from overwinter.simulation.scenario import Machine
from overwinter.simulation.workloads import Workload
from overwinter.telemetry.report import Report, StepReader

JITTER_MOST = 0.3
LEAST_S = 1e-3
LEAST_RUNS = 2


class Observed(NamedTuple):
    """The seconds of one function's operations, in their order."""

    first: list[float]
    """The time from each start of a worker to the end of its first run."""
    later: list[float]
    """The times of runs in workers that had run before."""


class JournalFigures(NamedTuple):
    """The figures of a whole journal."""

    functions: Mapping[FunctionId, Observed]
    disk_bytes_per_s: float | None
    """The rate at which blocks were loaded from disk; None: none were."""


def observed(entries: Iterable[Entry]) -> JournalFigures:
    """Return the runs in a journal, without those of workers started with a warm-up, and the rate of loads."""
    functions: dict[FunctionId, Observed] = defaultdict(lambda: Observed([], []))
    started: dict[WorkerId, tuple[FunctionId, Seconds]] = {}
    ran: set[WorkerId] = set()
    begun: dict[RunId, Seconds] = {}
    load_began: dict[FunctionId, Seconds] = {}
    loaded_bytes, loading_s = 0, 0.0
    for entry in entries:
        match entry.event:
            case RunEnded(worker, run) if worker in started:
                function, at = started[worker]
                seen = functions[function]
                if worker in ran:
                    seen.later.append(entry.now - begun[run])
                else:
                    seen.first.append(entry.now - at)
                ran.add(worker)
            case BlocksLoaded(function, _, added) if added and function in load_began:
                loaded_bytes += added
                loading_s += entry.now - load_began[function]
            case _:
                pass
        for action in entry.actions:
            match action:
                case StartWorker(worker, function, warm_up) if not warm_up:
                    started[worker] = (function, entry.now)
                case Run(_, run):
                    begun[run] = entry.now
                case LoadBlocks(function):
                    load_began[function] = entry.now
                case _:
                    pass
    return JournalFigures(dict(functions), loaded_bytes / loading_s if loading_s else None)


def modelled(
    name: str, settings: Settings, workload: Workload, profile: Profile, seen: Observed, machine: Machine
) -> FunctionModel:
    """Return the simulator's model of the function: its profile, and the additional time of runs in service.

    Its first start counts as that of a program that is not compiled yet.
    """
    run_s, usual_s = statistics.median(seen.later), statistics.median(seen.first[1:])
    more_s = max(0.0, run_s - (profile.latency_s(1, 1, 1) or run_s))
    spread = statistics.stdev(seen.later) / statistics.fmean(seen.later) if len(seen.later) >= LEAST_RUNS else 0.0
    rows = (
        (p.cores, p.batch, p.concurrency, 1e3 * (p.latency_s + more_s), p.memory_bytes / MIB) for p in profile.points
    )
    return FunctionModel(
        name=name,
        blocks=(Blocks(mib=profile.weight_bytes / MIB),),
        profile=tuple(rows),
        gmacs=profile.macs / 1e9,
        jitter=min(JITTER_MOST, spread),
        start_s=max(LEAST_S, usual_s - run_s - machine.fork_s),
        prepare_s=max(0.0, seen.first[0] - usual_s),
        settings=settings,
        workload=workload,
    )


def arrivals(entries: Iterable[Entry]) -> list[tuple[float, str]]:
    """Return the time and the function of each arrival, in order."""
    return [(entry.now, entry.event.name) for entry in entries if isinstance(entry.event, Arrived)]


def read(entries: Sequence[Entry], first_at: float, duration_s: float) -> Report:
    """Return the report of a journal, with all times shifted so that the first request arrives at `first_at`. It ends
    at `duration_s`, or when the requests that are open then are answered. Steps before 0 count as if they were at 0.
    """
    came = next(entry.now for entry in entries if isinstance(entry.event, Arrived))
    reader = StepReader(duration_s)
    last = 0.0
    for entry in entries:
        now = Seconds(max(0.0, entry.now - came + first_at))
        if now > duration_s and not reader.open_requests:
            break
        reader.observe(now, entry.event, list(entry.actions))
        last = now
    return reader.report(Seconds(max(last, duration_s)))

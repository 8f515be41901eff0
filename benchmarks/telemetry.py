"""Measures the cost of telemetry: the reader of steps, compared with scheduler and journal, and a Prometheus scrape.

One scheduler serves many functions that share most blocks. Its steps are recorded; then they are handled, written and
read again one after the other, so that all parts run under the same conditions. Run it by
`python -m benchmarks.telemetry`.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import click

from benchmarks.measure import print_result
from overwinter.core.actions import Action, LoadBlocks, Run, StartWorker
from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Arrived, BlocksLoaded, Deployed, Event, RunEnded, WorkerReady
from overwinter.core.function import BlobSize, FunctionSpec, Settings
from overwinter.core.ids import Address, FunctionName, RequestId, Seconds, TenantId, function_id
from overwinter.core.journal import Journal
from overwinter.scheduler.scheduler import Scheduler
from overwinter.scheduler.snapshot import Snapshot, snapshot
from overwinter.store.host import VerificationCounts
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.activity import activity
from overwinter.telemetry.metrics import render
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import Statistics

SHARED_BLOCKS, OWN_BLOCKS = 50, 4
ROUNDS = 5
Step = tuple[Seconds, Event, list[Action]]


def spec(number: int) -> FunctionSpec:
    """Return a variant that shares most of its blocks with all others."""
    name = FunctionName(f"variant-{number:04}")
    blobs = [BlobSize(Address(f"base-{block}"), 1 << 20) for block in range(SHARED_BLOCKS)]
    blobs += [BlobSize(Address(f"{name}-{block}"), 1 << 16) for block in range(OWN_BLOCKS)]
    return FunctionSpec(
        id=function_id(name, 1),
        name=name,
        version=1,
        tenant=TenantId("tenant"),
        settings=Settings(slo_ms=100, keep_alive_s=1e6),
        program=Address("program"),
        has_handler=False,
        blobs=tuple(blobs),
    )


class Served:
    """A scheduler whose actions succeed after a millisecond each, with its steps."""

    def __init__(self, functions: int) -> None:
        self.config = SchedulerConfig(workers_max=functions, cores=2)
        self.scheduler = Scheduler(self.config)
        self.steps: list[Step] = []
        self._now = 0.0
        for number in range(functions):
            self._post(Deployed(spec(number)))

    def ask(self, functions: int, requests: int) -> list[Step]:
        """Send a request to each function in turn; return the steps."""
        begun = len(self.steps)
        for number in range(requests):
            name = FunctionName(f"variant-{number % functions:04}")
            self._post(Arrived(RequestId(len(self.steps)), name, None, None))
        return self.steps[begun:]

    def _post(self, event: Event) -> None:
        waiting = [event]
        while waiting:
            self._now += 0.001
            event = waiting.pop(0)
            actions = self.scheduler.handle(event, Seconds(self._now))
            self.steps.append((Seconds(self._now), event, actions))
            for action in actions:
                match action:
                    case LoadBlocks(function, operation):
                        waiting.append(BlocksLoaded(function, operation, 1 << 20))
                    case StartWorker(worker):
                        waiting.append(WorkerReady(worker))
                    case Run(worker, run):
                        waiting.append(RunEnded(worker, run))


def spent_us(steps: list[Step], do: Callable[[Seconds, Event, list[Action]], object]) -> float:
    """Return the mean CPU microseconds of a step in this thread."""
    begun = time.thread_time()
    for step in steps:
        do(*step)
    return (time.thread_time() - begun) / len(steps) * 1e6


def taken_whole(scheduler: Scheduler, now: Seconds) -> Snapshot:
    """Take a snapshot, all its steps at once."""
    steps = snapshot(scheduler.state, scheduler.resources, now)
    while True:
        try:
            next(steps)
        except StopIteration as taken:
            return taken.value  # type: ignore[no-any-return]


@click.command()
@click.option("--functions", default=1000, show_default=True)
@click.option(
    "--requests", default=20_000, show_default=True, help="Requests that are measured, with all functions awake."
)
def main(functions: int, requests: int) -> None:
    """Print the microseconds of a step, and the milliseconds of an answer to Prometheus and to `top`."""
    served = Served(functions)
    served.ask(functions, functions)
    woken, asked = len(served.steps), served.ask(functions, requests)
    # Otherwise each garbage collection would traverse the kept steps.
    gc.freeze()
    spent: dict[str, list[float]] = {"scheduler": [], "journal": [], "reader": []}
    for _ in range(ROUNDS):
        scheduler, journal, reader = Scheduler(served.config), Journal(served.config, 4096), Statistics()
        for now, event, actions in served.steps[:woken]:
            scheduler.handle(event, now)
            reader.observe(now, event, actions)
        spent["scheduler"].append(
            spent_us(asked, lambda now, event, _, scheduler=scheduler: scheduler.handle(event, now))
        )  # type: ignore[misc]
        spent["journal"].append(spent_us(asked, journal.record))
        spent["reader"].append(spent_us(asked, reader.observe))
    sources = Sources(served.config, reader, Accounts(), VerificationCounts(), Counter())
    now, begun = served.steps[-1][0], time.perf_counter()
    known = taken_whole(served.scheduler, now)
    taken = time.perf_counter()
    text = render(sources, known, (), now)
    rendered = time.perf_counter()
    activity(sources, known, now)
    shown = time.perf_counter()
    step_us = {name: round(median(rounds), 2) for name, rounds in spent.items()}
    for name, microseconds in step_us.items():
        print(f"{name:8} {microseconds:7.2f} us a step")
    print(f"snapshot of {functions} functions: {(taken - begun) * 1e3:.1f} ms")
    print(f"metrics of {functions} functions: {len(text.splitlines())} lines, {(rendered - taken) * 1e3:.0f} ms")
    print(f"activity of {functions} functions: {(shown - rendered) * 1e3:.0f} ms")
    print_result(
        {
            "step_us": step_us,
            "reader_by_scheduler": round(step_us["reader"] / step_us["scheduler"], 3),
            "snapshot_ms": round((taken - begun) * 1e3, 1),
            "metrics_ms": round((rendered - taken) * 1e3, 1),
            "metrics_lines": len(text.splitlines()),
            "top_ms": round((shown - rendered) * 1e3, 1),
        }
    )


if __name__ == "__main__":
    main()

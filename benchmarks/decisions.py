"""Hashes the scheduler's decisions in every scenario, under every policy and every set of limits.

It prints one line per case: a hash of the journal (every event and action with its time, in order), and the figures of
the run. `--save` stores the lines, `--against` compares with stored ones: equal hashes are equal decisions; for others
it prints the figures of both. So a change of the scheduler can be compared with the version before.

Scenarios are shortened to some seconds, pipelines of the examples use functions with invented times, and the random
worlds are those of the scheduler's own tests, with several tenants, trials, removals and memory pressure. The limits
are derived from the scenario alone, so that they do not change with the scheduler. A hash must not depend on
PYTHONHASHSEED: run it with several values.
"""

import argparse
import hashlib
import io
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from benchmarks.measure import print_result
from overwinter.core.actions import Refuse, Reply, StartWorker
from overwinter.core.policies import POLICIES
from overwinter.simulation.scenario import Scenario, read_scenario, scenario_of
from overwinter.simulation.world import World
from tests.scheduler import replayed
from tests.scheduler.world import World as RandomWorld

ROOT = Path(__file__).parent.parent


class Shortened(NamedTuple):
    """The part of a scenario that is run."""

    seconds: float = 30.0
    """Longer than a period of the scalers, and at most a second or two of computing."""
    few: int = 4
    """The workers, and the cores of workers, if they are scarce."""


SHORTENED = {
    "asyfunc": Shortened(12.0, 30),
    "faults": Shortened(120.0, 3),
    "small": Shortened(200.0, 2),
    "thousand": Shortened(12.0, 100),
    "twitter": Shortened(30.0, 4),
    "tetris/ss": Shortened(40.0, 2),
    "tetris/svt": Shortened(40.0, 6),
    "tetris/qa-audio": Shortened(40.0, 4),
    "tetris/qa-text": Shortened(15.0, 4),
    "pipelines/faces": Shortened(120.0, 2),
    "pipelines/inbox": Shortened(120.0, 2),
}
HOST_SHARE = 0.8
"""The size of a small host store, relative to the blocks of all functions."""
BOUNDS = ("none", "memory", "host", "workers", "cores", "tenants", "all")
"""The resource that is scarce in addition to the scenario's limits. tenants: each kind of function has its own tenant,
and workers are few.
"""
SEEDS = (1, 2, 3)
STEPS = 600
"""The steps of a random world."""
RANDOM: Mapping[str, Mapping[str, int]] = {
    "none": {},
    "memory": {"memory_bytes": 40},
    "host": {"host_bytes": 60},
    "workers": {"workers_max": 4},
    "cores": {"cores": 2},
    "tenants": {"workers_max": 4, "tenant_workers_max": 2},
    "all": {"memory_bytes": 40, "host_bytes": 60, "workers_max": 4, "cores": 2},
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's decisions in one run, and their results."""

    hash: str
    attainment: float | None
    """The attainment of requests with an SLO, or of pipelines if there are any; None: there were none."""
    peak_mib: float
    """The peak of blocks and private memory of workers; of random worlds the peak number of blocks."""
    wakes: int
    missed: int
    """The requests with an SLO that were not answered within it."""
    answered: int
    refused: int
    requests_per_s: float
    """The speed of the simulator on this core."""


class Saved(msgspec.Struct, frozen=True):
    """The file that `--save` writes."""

    commit: str
    runs: dict[str, Outcome]


class Case(NamedTuple):
    """One possible run."""

    scenario: str
    policy: str
    bounds: str
    run: Callable[[], Outcome]

    @property
    def name(self) -> str:
        """The name of the run in the file."""
        return f"{self.scenario} {self.policy} {self.bounds}"


class Hash(io.RawIOBase):
    """A journal file of which only the hash is kept. Its first line, the configuration, is not a step."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._steps = False

    def write(self, line: Any) -> int:
        """Add a step."""
        if self._steps:
            self._hash.update(line)
        self._steps = True
        return len(line)

    def hexdigest(self) -> str:
        """Return the hash of all steps."""
        return self._hash.hexdigest()


class HashedWorld(RandomWorld):
    """A random world that keeps the hash of its steps, and the peak number of its blocks."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.hash = Hash()
        self.hash.write(b"")
        self.peak = 0

    def send(self, event: Any) -> list[Any]:
        """Send the event to the scheduler."""
        actions = super().send(event)
        self.hash.write(msgspec.json.encode((self.now, event, actions)))
        self.peak = max(self.peak, len(self.resident))
        return actions


# Scenarios


def pipeline_scenario(path: Path, seconds: float) -> Scenario:
    """Return a pipeline of the examples over functions with invented times."""
    pipeline = tomllib.loads(path.read_text())
    stages = pipeline["stages"]
    names = sorted({stage["function"] for stage in stages.values()})
    functions = [
        {
            "name": name,
            "blocks": [{"mib": 10, "count": 4, "shared": path.stem}, {"mib": 2}],
            "latency_ms": {"1": 15 + 10 * number, "4": 40 + 30 * number},
            "jitter": 0.1,
            "settings": {"slo_ms": pipeline["slo_ms"] / len(stages), "max_batch": 4, "keep_alive_s": 5},
        }
        for number, name in enumerate(names)
    ]
    application = {
        "name": pipeline["name"],
        "slo_ms": pipeline["slo_ms"],
        "stages": {name: {key: stage[key] for key in ("function", "inputs")} for name, stage in stages.items()},
        "workload": {"kind": "bursty", "rate": 2, "factor": 15, "every_s": 30, "length_s": 4},
    }
    table = {"duration_s": seconds, "node": {"cores": 4}}
    return scenario_of(table | {"functions": functions, "applications": [application]})


def scenarios(longer: float) -> Iterator[tuple[str, Scenario]]:
    """Yield all scenarios by name, shortened."""
    folder = ROOT / "scenarios"
    for path in sorted(folder.rglob("*.toml")):
        name = str(path.relative_to(folder).with_suffix(""))
        scenario = read_scenario(path)
        seconds = min(scenario.duration_s, longer * SHORTENED.get(name, Shortened()).seconds)
        yield name, msgspec.structs.replace(scenario, duration_s=seconds, settle_s=0.0)
    for path in sorted((ROOT / "examples" / "pipelines").glob("*.toml")):
        name = f"pipelines/{path.stem}"
        yield name, pipeline_scenario(path, longer * SHORTENED.get(name, Shortened()).seconds)


def bounded(scenario: Scenario, policy: str, bounds: str, most: int) -> Scenario:
    """Return the scenario under a policy with scarcer resources: at most this many workers and cores."""
    functions = scenario.simulated_functions()
    workers = [min(point.memory_bytes for point in each.spec.profile.points) for each in functions]
    blocks = {blob.address: blob.nbytes for each in functions for blob in each.spec.blobs}
    largest = max(sum({blob.address: blob.nbytes for blob in each.spec.blobs}.values()) for each in functions)
    few: dict[str, dict[str, Any]] = {
        "none": {},
        "memory": {"memory_bytes": max(2 * max(workers), most * sum(workers) // len(workers))},
        "host": {"host_bytes": max(largest, int(HOST_SHARE * sum(blocks.values())))},
        "workers": {"workers_max": most},
        "cores": {"cores": min(most, max(1, scenario.node.cores // 2))},
        "tenants": {"workers_max": most},
    }
    few["all"] = {key: value for each in few.values() for key, value in each.items()}
    models = scenario.functions
    if bounds == "tenants":
        models = tuple(msgspec.structs.replace(each, tenant=each.name) for each in models)
    scheduler = msgspec.structs.replace(scenario.scheduler, policy=policy, **few[bounds])
    return msgspec.structs.replace(scenario, scheduler=scheduler, functions=models)


# Runs


def simulate(scenario: Scenario, policy: str, bounds: str, most: int, traces: Path) -> Outcome:
    """Run a scenario."""
    journal = Hash()
    world = World(bounded(scenario, policy, bounds, most), traces, journal)
    begun = time.process_time()
    report = world.run()
    spent = time.process_time() - begun
    total, ends = report.total, report.applications.values()
    with_slo = [(each.requests, each.attainment) for each in (*report.functions.values(), *ends)]
    if ends:
        with_slo = [(each.requests, each.attainment) for each in ends]
    with_slo_count = sum(requests for requests, attainment in with_slo if attainment is not None)
    within = sum(round(requests * attainment) for requests, attainment in with_slo if attainment is not None)
    return Outcome(
        hash=journal.hexdigest(),
        attainment=within / with_slo_count if with_slo_count else None,
        peak_mib=round(report.memory.peak / 2**20, 3),
        wakes=sum(total.wakes.values()),
        missed=with_slo_count - within,
        answered=total.answered,
        refused=sum(total.refused.values()),
        requests_per_s=round(total.requests / spent),
    )


def run_random(seed: int, policy: str, bounds: str) -> Outcome:
    """Run a random world."""
    world = HashedWorld(policy=policy, **RANDOM[bounds])
    begun = time.process_time()
    replayed.play(world, Random(seed), STEPS)
    spent = time.process_time() - begun
    return Outcome(
        hash=world.hash.hexdigest(),
        attainment=None,
        peak_mib=world.peak,
        wakes=sum(isinstance(action, StartWorker) for action in world.log),
        missed=0,
        answered=sum(isinstance(action, Reply) for action in world.log),
        refused=sum(isinstance(action, Refuse) for action in world.log),
        requests_per_s=round(world.next_request / spent),
    )


def cases(traces: Path | None, longer: float) -> Iterator[Case]:
    """Yield all possible runs; those with a recorded trace only if `traces` is given."""
    for name, scenario in scenarios(longer):
        recorded = any(getattr(each.workload, "path", None) for each in scenario.functions)
        if recorded and traces is None:
            print(f"{name} is left out: --traces gives the directory of recorded traces")
            continue
        few = SHORTENED.get(name, Shortened()).few
        for policy in POLICIES:
            for bounds in BOUNDS:
                yield Case(name, policy, bounds, partial(simulate, scenario, policy, bounds, few, traces or Path()))
    for seed in SEEDS:
        for policy in POLICIES:
            for bounds in RANDOM:
                yield Case(f"random/{seed}", policy, bounds, partial(run_random, seed, policy, bounds))


# Output


def outcome_text(outcome: Outcome) -> str:
    """Format the figures of a run as a line."""
    attainment = "     -" if outcome.attainment is None else f"{outcome.attainment:6.4f}"
    return (
        f"{outcome.hash}  {attainment} {outcome.peak_mib:9.1f} {outcome.wakes:6} {outcome.missed:6} "
        f"{outcome.answered:8} {outcome.refused:8} {outcome.requests_per_s:10.0f}"
    )


HEAD = f"{'scenario policy bounds':40} {'hash':17} attain  peak MiB  wakes missed answered  refused requests/s"


def commit() -> str:
    """Return the commit of this source, and whether it was changed since; `unknown` outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def read(path: Path) -> Saved:
    """Read a saved file."""
    return msgspec.json.decode(path.read_bytes(), type=Saved)


def save(path: Path, runs: Mapping[str, Outcome]) -> None:
    """Write a line for each run; existing lines of the same commit are kept."""
    now, kept = commit(), {}
    if path.exists() and (before := read(path)).commit == now:
        kept = before.runs
    encode = msgspec.json.Encoder().encode
    lines = (f"{encode(name).decode()}: {encode(outcome).decode()}" for name, outcome in (kept | runs).items())
    path.write_text(f'{{"commit": {encode(now).decode()}, "runs": {{\n' + ",\n".join(lines) + "\n}}\n")


def compare(old: Saved, new: Mapping[str, Outcome]) -> int:
    """Print the differences from the saved file for each scenario; return the number of different runs."""
    print(f"\nagainst {old.commit}:")
    both = [name for name in new if name in old.runs]
    differing = [name for name in both if new[name].hash != old.runs[name].hash]
    for name in differing:
        print(f"{name:40} {outcome_text(old.runs[name])}\n{'':40} {outcome_text(new[name])}")
    for scenario in dict.fromkeys(name.split()[0] for name in both):
        own = [name for name in both if name.split()[0] == scenario]
        sums = [summed([runs[name] for name in own]) for runs in (old.runs, new)]
        changed = sum(name in differing for name in own)
        print(f"{scenario:20} {len(own) - changed} of {len(own)} the same; old, new: {sums[0]} | {sums[1]}")
    return len(differing)


def summed(outcomes: Iterable[Outcome]) -> str:
    """Format the figures of several runs: means of attainment and peak, sums of the others."""
    runs = list(outcomes)
    kept = [each.attainment for each in runs if each.attainment is not None]
    attainment = "-" if not kept else f"{sum(kept) / len(kept):.4f}"
    peak = sum(each.peak_mib for each in runs) / len(runs)
    counts = [sum(getattr(each, name) for each in runs) for name in ("wakes", "missed", "answered", "refused")]
    spent = sum((each.answered + each.refused) / each.requests_per_s for each in runs if each.requests_per_s)
    rate = (counts[2] + counts[3]) / spent if spent else 0.0
    return f"{attainment} {peak:.1f} MiB, wakes {counts[0]}, missed {counts[1]}, {rate:.0f}/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="the directory that contains torpor-alibaba-fc")
    parser.add_argument(
        "--only", nargs="*", default=[], help="run only cases with one of these words in 'scenario policy bounds'"
    )
    parser.add_argument("--longer", type=float, default=1.0, help="factor for the simulated seconds of each scenario")
    parser.add_argument("--save", type=Path, help="write the lines to this file")
    parser.add_argument("--against", type=Path, help="compare with this file")
    options = parser.parse_args()
    runs: dict[str, Outcome] = {}
    print(HEAD)
    for case in cases(options.traces, options.longer):
        if not options.only or any(word in case.name for word in options.only):
            runs[case.name] = case.run()
            print(f"{case.name:40} {outcome_text(runs[case.name])}", flush=True)
    if options.save is not None:
        save(options.save, runs)
    differing = None
    if options.against is not None:
        differing = compare(read(options.against), runs)
    everything = hashlib.blake2b("".join(each.hash for each in runs.values()).encode(), digest_size=8).hexdigest()
    print_result({"runs": len(runs), "hash": everything, "differing": differing})


if __name__ == "__main__":
    main()

"""Compares the simulator with a real node: the same small scenario, simulated and live.

`python -m benchmarks.beside [--seconds S] [--seed N]` deploys a few models of the zoo on a real node,
profiles them there, and wakes each several times, first with its blocks in the repository only, whose files are in the
page cache, then with its blocks in the host store. From these figures a scenario is made and simulated. Then the
requests of the simulation are sent to the real node over HTTP, open-loop. Both journals are read by the same reader.
Live memory is the kernel's: private memory of the workers, and pages of the host store.

The simulator models cores, the zygote, the disk and the profile. It does not model the daemon and the load generator,
which share the cores with the workers, nor other load. A simulated worker's private memory is the peak in its profile;
live memory is what workers have at the time of the sample.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks import calibration
from benchmarks.families import Family, as_tensors
from benchmarks.measure import MIB, occupied_bytes, print_result, quantile
from benchmarks.nodes import Node, running_node
from benchmarks.openloop import Outcome, Plan, Target
from benchmarks.wire import END, Connection, binary_request
from overwinter.core.function import Settings
from overwinter.core.ids import function_id
from overwinter.core.journal import Entry, read_journal
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileOptions
from overwinter.simulation.scenario import Machine, Scenario
from overwinter.simulation.workloads import Bursty, Poisson, Workload
from overwinter.simulation.world import World
from overwinter.telemetry.report import Figures, Report
from overwinter.worker.measure import KIB, kibibytes

ROUNDS = 5
WARM_RUNS = 10
SAMPLED_EVERY_S = 1.0
PATIENCE_S = 30.0


class FunctionSetup(NamedTuple):
    """One function of the scenario."""

    settings: Settings
    workload: Workload


SETUPS: Mapping[str, FunctionSetup] = {
    "mlp": FunctionSetup(Settings(slo_ms=50, keep_alive_s=2), Poisson(12.0)),
    "minilm": FunctionSetup(Settings(slo_ms=250, keep_alive_s=2, max_batch=4), Bursty(1.5, 5.0, 15.0, 4.0)),
    "resnet50": FunctionSetup(Settings(slo_ms=500, keep_alive_s=1), Poisson(0.8)),
    "textcnn": FunctionSetup(Settings(slo_ms=100, keep_alive_s=1), Poisson(0.4)),
}
"""The functions, by model of the zoo: one that is always awake, one with bursts, and two that wake repeatedly."""


class Results(NamedTuple):
    """The results of the scenario in simulation or on the node; memory is the mean over time."""

    report: Report
    private_mib: float
    blocks_mib: float


def profiled(node: Node, families: Mapping[str, Family]) -> dict[str, Profile]:
    """Deploy all functions, and let the node profile each."""
    for name, family in families.items():
        family.deploy(node.client, name, **non_default(SETUPS[name].settings))
    return {name: node.client.profile(name, options=ProfileOptions(layers=False)) for name in families}


def non_default(settings: Settings) -> dict[str, float]:
    """Return the settings that differ from the defaults."""
    given, defaults = msgspec.structs.asdict(settings), msgspec.structs.asdict(Settings())
    return {key: value for key, value in given.items() if value != defaults[key]}


def wake_all(node: Node, http_requests: Mapping[str, bytes]) -> None:
    """Wake each function several times, at first with an empty host store, and run each several times while awake."""
    with Connection(node.port) as connection:
        for _ in range(ROUNDS):
            for name, request in http_requests.items():
                connection.ask(request)
                node.wait_workers(name, 0)
            node.wait_quiet()
        for request in http_requests.values():
            for _ in range(WARM_RUNS):
                connection.ask(request)


def journal_steps(journal: Path) -> list[Entry]:
    """Return all steps of a journal file."""
    with journal.open("rb") as file:
        return list(read_journal(file)[1])


def scenario_from(profiles: Mapping[str, Profile], entries: Sequence[Entry], seconds: float, seed: int) -> Scenario:
    """Return the scenario with the figures that were just measured on this machine."""
    in_journal = calibration.observed(entries)
    machine = Machine(cores=len(os.sched_getaffinity(0)))
    if in_journal.disk_bytes_per_s is not None:
        machine = msgspec.structs.replace(machine, disk_mib_per_s=in_journal.disk_bytes_per_s / MIB)
    functions = tuple(
        calibration.modelled(
            name, setup.settings, setup.workload, profiles[name], in_journal.functions[function_id(name, 1)], machine
        )
        for name, setup in SETUPS.items()
    )
    for each in functions:
        run_ms = 1e3 * (each.scheduler_profile().latency_s(1, 1, 1) or 0.0)
        start = f"start {1e3 * each.start_s:.0f} ms, the first time {1e3 * each.prepare_s:.0f} more"
        print(f"  {each.name:9} run {run_ms:.1f} ms, spread {each.jitter:.0%}, {start}, {each.blocks[0].mib:.0f} MiB")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"  page cache {machine.disk_mib_per_s:.0f} MiB/s, {machine.cores} cores; load averages {load}")
    return Scenario(seed=seed, duration_s=seconds, node=machine, functions=functions)


def simulated(scenario: Scenario) -> tuple[Results, list[tuple[float, str]]]:
    """Return the simulator's results, and the arrivals that it generated: the time and the function of each request."""
    file = BytesIO()
    report = World(scenario, journal=file).run()
    file.seek(0)
    arrivals = calibration.arrivals(read_journal(file)[1])
    return Results(report, report.memory.workers_mean / MIB, report.memory.blocks_mean / MIB), arrivals


def private_bytes(pids: Sequence[int]) -> int:
    """Return the private memory of these processes, counted as in a profile."""
    total = 0
    for pid in pids:
        # The process may have ended meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/smaps") as file:
            total += kibibytes(file)[0] * KIB
    return total


def send_plan(node: Node, plan: Plan) -> tuple[list[Outcome], float, float]:
    """Send the requests; return their outcomes, and the mean private memory and blocks in MiB."""
    private, blocks = [], []
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        files = [Path(root) / "plan", Path(root) / "outcomes"]
        files[0].write_bytes(msgspec.msgpack.encode(plan))
        command = [sys.executable, "-m", "benchmarks.openloop", str(node.port), *map(str, files)]
        with subprocess.Popen(command) as generator:
            while generator.poll() is None:
                private.append(private_bytes(node.worker_pids()))
                blocks.append(occupied_bytes(node.host_store))
                with suppress(subprocess.TimeoutExpired):
                    generator.wait(SAMPLED_EVERY_S)
        if generator.returncode:
            raise RuntimeError(f"the load generator ended with status {generator.returncode}")
        outcomes = msgspec.msgpack.decode(files[1].read_bytes(), type=list[Outcome])
    return outcomes, statistics.fmean(private) / MIB, statistics.fmean(blocks) / MIB


def live(
    node: Node,
    http_requests: Mapping[str, bytes],
    arrivals: Sequence[tuple[float, str]],
    seconds: float,
    journal: Path,
) -> Results:
    """Return the results of the real node for these arrivals. The node is freshly started, and stopped at the end."""
    indices = {name: index for index, name in enumerate(http_requests)}
    plan = Plan(
        [Target(request.partition(END)[0] + END, indices[name], b"") for name, request in http_requests.items()],
        [request.partition(END)[2] for request in http_requests.values()],
        [(at, indices[name]) for at, name in arrivals],
        PATIENCE_S,
    )
    outcomes, private_mib, blocks_mib = send_plan(node, plan)
    node.stop()
    failed = sum(each.status != 200 for each in outcomes)
    delay_s = quantile([each.delay_s for each in outcomes], 0.99)
    print(f"{len(outcomes)} requests, {failed} without success; the generator sent them with a delay of", end=" ")
    print(f"{1e3 * delay_s:.1f} ms (p99)")
    report = calibration.read(journal_steps(journal), arrivals[0][0], seconds)
    return Results(report, private_mib, blocks_mib)


def figures(results: Results) -> dict[str, float]:
    """Return the figures to compare in total."""
    return {
        **figures_of(results.report.total),
        "workers": results.report.total.worker_seconds / results.report.duration_s,
        "busy_s": results.report.total.busy_seconds,
        "private_mib": results.private_mib,
        "blocks_mib": results.blocks_mib,
    }


def figures_of(each: Figures) -> dict[str, float]:
    """Return the figures to compare, of one function or of all."""
    return {
        "requests": each.requests,
        "attainment": each.attainment or 0.0,
        "p50_ms": each.p50_ms or 0.0,
        "p99_ms": each.p99_ms or 0.0,
        "wakes_disk": each.wakes.get("disk", 0),
        "wakes_host": each.wakes.get("host", 0),
    }


def errors(live_figures: Mapping[str, float], simulated_figures: Mapping[str, float]) -> dict[str, float]:
    """Return the simulator's errors relative to the live figures (the simulated figure itself where the live one is 0);
    for the attainment, the difference.
    """
    found = {}
    for key, value in live_figures.items():
        difference = simulated_figures[key] - value
        found[key] = difference / value if value and key != "attainment" else difference
    return found


def show(title: str, live_figures: Mapping[str, float], simulated_figures: Mapping[str, float]) -> None:
    """Print a table of three columns."""
    print(f"\n{title:14}{'live':>12}{'simulated':>12}{'error':>9}")
    for key, error in errors(live_figures, simulated_figures).items():
        relative = f"{error:+9.1%}" if live_figures[key] else f"{'-':>9}"
        print(f"  {key:12}{live_figures[key]:12.4g}{simulated_figures[key]:12.4g}{relative}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75.0, help="seconds of requests; default 75")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests; default 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = {name: Family(name) for name in SETUPS}
    http_requests = {name: binary_request(name, as_tensors(family.one())) for name, family in families.items()}
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        journal = Path(root) / "journal"
        with running_node("--journal", str(journal)) as node:
            profiles = profiled(node, families)
            # Restart the node, so that the host store is empty and no program is compiled.
            node.stop()
            node.start()
            wake_all(node, http_requests)
            node.stop()
            scenario = scenario_from(profiles, journal_steps(journal), options.seconds, options.seed)
            simulated_results, arrivals = simulated(scenario)
            node.start()
            live_results = live(node, http_requests, arrivals, options.seconds, journal)
    for name in SETUPS:
        show(
            name,
            figures_of(live_results.report.functions[name]),
            figures_of(simulated_results.report.functions[name]),
        )
    totals = figures(live_results), figures(simulated_results)
    show("all", *totals)
    print_result({"live": totals[0], "simulated": totals[1], "error": errors(*totals)})


if __name__ == "__main__":
    main()

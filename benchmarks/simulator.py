"""Measures the speed of the simulator: a day of a thousand functions, about 14 million requests, on one core.

The scenario is scenarios/thousand.toml; `--traces` is the directory that contains the recorded trace. Without
`--full`, only a part of the day is simulated, and the time for the whole day is extrapolated from it.
"""

import argparse
import cProfile
import pstats
import time
from pathlib import Path

import msgspec

from benchmarks.measure import print_result
from overwinter.simulation.scenario import Scenario, read_scenario
from overwinter.simulation.world import World
from overwinter.telemetry.report import Report

DAY_S = 86400.0
TARGET_PER_S = 10_000.0
SCENARIO = Path(__file__).parent.parent / "scenarios" / "thousand.toml"
HOT_SPOTS = 25


def simulate(scenario: Scenario, traces: Path, seconds: float) -> tuple[Report, float]:
    """Return the report of this many simulated seconds, and the CPU seconds that they took."""
    world = World(msgspec.structs.replace(scenario, duration_s=seconds), traces)
    begun = time.process_time()
    report = world.run()
    return report, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the directory that contains torpor-alibaba-fc")
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds of the day to simulate; default 3600")
    parser.add_argument("--full", action="store_true", help="simulate the whole day")
    parser.add_argument("--profile", action="store_true", help="profile the simulator instead; slower, without RESULT")
    options = parser.parse_args()
    seconds = DAY_S if options.full else options.seconds
    profiler = cProfile.Profile()
    begun = time.perf_counter()
    if options.profile:
        profiler.enable()
    report, spent = simulate(read_scenario(SCENARIO), options.traces, seconds)
    profiler.disable()
    wall = time.perf_counter() - begun
    total = report.total
    rate = total.requests / spent
    print(f"{seconds:.0f} simulated seconds, {len(report.functions)} functions, {total.requests} requests")
    print(f"answered {total.answered}, refused {sum(total.refused.values())}, lost {total.lost}")
    print(f"SLO attainment {total.attainment:.4f}, p50 {total.p50_ms:.1f} ms, p99 {total.p99_ms:.1f} ms")
    print(f"woken {sum(total.wakes.values())} times; simulated memory {report.memory.peak / 2**20:.0f} MiB at most")
    print(
        f"{spent:.1f} s of one core, {wall:.1f} s of wall time: {rate:.0f} requests/core-s (target {TARGET_PER_S:.0f})"
    )
    if not options.full:
        day = total.requests * DAY_S / seconds
        print(f"a whole day, extrapolated: {day / 1e6:.1f} million requests, {day / rate:.0f} s")
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(HOT_SPOTS)
    else:
        print_result({"requests_per_s": rate, "requests": total.requests, "simulated_s": seconds, "lost": total.lost})


if __name__ == "__main__":
    main()

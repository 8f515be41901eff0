"""Repeats Torpor's evaluation in the simulator: how many functions on one node keep their SLO, under which policies.

`python -m benchmarks.torpor --traces DIR` simulates the paper's node (scenarios/torpor.toml: 4 devices of 32 GB, the
latencies of its tables 3 and 4, the recorded rates) with the node's own scheduler. A function complies if 98 % of its
requests are answered within its SLO, from arrival to answer. Each table of a figure says what the paper has there.
`torpor` is the paper's policies, `overwinter` this project's; all others replace one or more of the paper's, except
`native` and `infless-ka`, which model a process on a device for each function. Nothing depends on the machine that runs
the benchmark.
"""

import argparse
from pathlib import Path

from benchmarks.measure import print_result
from benchmarks.torpor.calibration import calibration
from benchmarks.torpor.figures import (
    Sizes,
    figure_10,
    figure_11,
    figure_12,
    figure_14,
    figure_16,
    full_compliance,
)
from benchmarks.torpor.setting import paper

WHOLE = Sizes(functions=(160, 320, 480, 560), cluster=(500, 1000), step=40, most=960, seeds=1, same=560, overfull=1.2)
QUICK = Sizes(functions=(40,), cluster=(30,), step=80, most=160, seeds=1, same=40, overfull=0.1)
QUICK_MINUTES = 0.2
PARTS = {
    "10": figure_10,
    "11": figure_11,
    "12": figure_12,
    "14": figure_14,
    "16": figure_16,
    "full": full_compliance,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the directory that contains torpor-alibaba-fc")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="minutes of the trace to simulate, at most 30; default 10"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds for figure 11; default 1")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="simulate only this part; repeatable; default all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few functions and a short time: a check, not a measurement"
    )
    options = parser.parse_args()
    sizes, minutes = (QUICK, QUICK_MINUTES) if options.quick else (WHOLE._replace(seeds=options.seeds), options.minutes)
    node, traces = paper(minutes), options.traces
    print(f"{minutes:g} minutes of the trace are counted, after {node.settle_s / 60:g} that are not")
    calibration(node)
    result: dict[str, object] = {}
    for part in options.part or PARTS:
        result |= PARTS[part](node, sizes, traces)
    print_result(result)


if __name__ == "__main__":
    main()

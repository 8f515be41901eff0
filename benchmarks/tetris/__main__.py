"""What does sharing tensors and runtimes save? Tetris's experiments, live and simulated.

`python -m benchmarks.tetris [--quick]`: memory against instances and variants, start-up, contention and latency on real
processes; then, simulated, the paper's applications. `live_saved` is the share of the memory of as many separate
processes that many instances of a model (or, where only these were measured, many variants) do not need;
`live_startup_saved` the share of the start of a plain process from the page cache that is saved when a twin is present.
"""

import argparse
from importlib import import_module
from importlib.util import find_spec

import torch

from benchmarks.measure import print_result
from benchmarks.tetris.live import live

SIMULATED = "benchmarks.tetris.simulated"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few models, few instances: a check, not a measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = dict(live(options.quick))
    if find_spec(SIMULATED) is not None:
        figures.update(import_module(SIMULATED).simulated(options.quick))
    print_result(figures)


if __name__ == "__main__":
    main()

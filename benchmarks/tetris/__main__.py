"""Repeats Tetris's experiments, live and simulated: what does sharing tensors and runtimes save?

`python -m benchmarks.tetris [--part live|simulated] [--full | --quick] [--seeds N]` measures memory against the number
of instances and variants, start-up, contention and latency with real processes, and simulates the paper's applications.
The fields of RESULT:

* `live_saved`: the share of the memory of separate processes that the same number of instances of a model (or variants,
  if only these were measured) saves;
* `live_startup_saved`: the share of a plain process's start-up time, from the page cache, that is saved if an instance
  of the same model is running. `with_imports` counts from the start of the process, most of which is importing PyTorch;
  `of_loading` is the control: a process that has imported everything before;
* `sim_saved_vs_...`: the share of a baseline's memory that is saved, as in its paper and, as the control, under equal
  conditions.
"""

import argparse

import torch

from benchmarks.measure import print_result
from benchmarks.tetris import live
from benchmarks.tetris.simulated import simulated

SEEDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("live", "simulated"), help="run only this part")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"number of seeds for the table of equal conditions; default {SEEDS}"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="more models, instances and starts in the live part")
    size.add_argument("--quick", action="store_true", help="few models, few instances: a check, not a measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    if options.part != "simulated":
        figures.update(live.live(live.FULL if options.full else live.QUICK if options.quick else live.USUAL))
    if options.part != "live":
        figures.update(simulated(1 if options.quick else options.seeds, options.quick))
    print_result(figures)


if __name__ == "__main__":
    main()

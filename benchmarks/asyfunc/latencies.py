"""Measures the run times of AsyFunc's models on this machine, on one core and on two.

`python -m benchmarks.asyfunc.latencies [model ...]` prints, for scenarios/asyfunc.toml, the minimum of several runs in
milliseconds by batch size, on one core, and `serial`, the share of a run that a second core does not shorten: by
Amdahl's law l(c) = l(1)·(serial + (1 - serial)/c), so serial = 2·l(2)/l(1) - 1. On one core it measures CPU time, which
other load hardly changes; on two cores the wall time of the smallest batch, over many runs, so that at least one run
had both cores.
"""

import argparse
import gc
import time
from collections.abc import Callable

import torch

from benchmarks import zoo
from benchmarks.measure import print_result

MODELS = ("inception-v3", "efficientnet-b5", "yolov8x", "ssd300", "resnet50", "vgg16")
BATCHES = (1, 2, 4, 8)
SPENT_S = 4.0
"""The seconds for each batch on one core; at least two runs."""
BOTH_S = 20.0
"""The seconds for a batch of 1 on two cores."""


def least_ms(model: zoo.Model, cores: int, batch: int, spent_s: float, clock: Callable[[], float]) -> float:
    """Return the least milliseconds of as many runs as fit in `spent_s`, at least two."""
    torch.set_num_threads(cores)
    repeated = torch.arange(batch) % zoo.BATCH
    inputs = {name: tensor.index_select(0, repeated) for name, tensor in model.example_inputs.items()}
    took: list[float] = []
    until = time.perf_counter() + spent_s
    with torch.inference_mode():
        while len(took) < 2 or time.perf_counter() < until:
            begun = clock()
            model.module(**inputs)
            took.append(1e3 * (clock() - begun))
    return min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model", help="models of the zoo")
    names = parser.parse_args().models
    results = {}
    for name in names:
        model = zoo.build(name)
        one = {batch: least_ms(model, 1, batch, SPENT_S, time.process_time) for batch in BATCHES}
        both = least_ms(model, 2, 1, BOTH_S, time.perf_counter)
        serial = max(0.0, 2 * both / one[1] - 1)
        row = ", ".join(f"{batch} = {value:.0f}" for batch, value in one.items())
        print(f"{name:16} latency_ms = {{ {row} }}  serial = {serial:.3f}, for {both:.0f} ms on two cores", flush=True)
        results[name] = {"one": one, "two": both, "serial": serial}
        del model
        gc.collect()
    print_result(results)


if __name__ == "__main__":
    main()

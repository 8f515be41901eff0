"""Measures how much longer a run in an executor takes than the same program in this process, in turns with it.

It counts from the order of a run to the end of the run, with the request's copy into the buffer and the answer's out
of it, but without HTTP and the scheduler. The model takes about 1 ms on one core, and its blocks are on the device. The
same request to a worker, in the same turns, shows how much of that any other process would add. All give the same bits.
"""

import time
from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
import uvloop

from benchmarks.measure import quantile
from benchmarks.pool.direct import TimedAnswer, direct_processes
from overwinter.api.deployer import package
from overwinter.core.devices import DeviceConfig
from overwinter.core.function import Settings
from overwinter.core.ids import DeviceId
from overwinter.model.compile import compile_program
from overwinter.model.export import Exported, export

DEVICE = DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=64 << 20)
IN_PROCESS, IN_EXECUTOR = "in this process", "through an executor"
WIDTH, ROWS = 128, 16
MODEL_S = 1e-3
ROUNDS, WARM = 2000, 200
TURNS = (20, 1)
"""The runs in one turn. In turns of one, another process has filled the processor's caches before each run."""
SHOWN = (0.1, 0.5, 0.99)


class Layers(torch.nn.Module):
    """Two layers that are used `count` times: their weights stay in the processor's cache while other processes run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.count = count
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(self.count):
            for layer in self.layers:
                x = torch.nn.functional.relu(layer(x))
        return {"y": x}


def made_for(seconds: float) -> Exported:
    """Return a program that takes about this long."""
    x, tried = torch.randn(1, ROWS, WIDTH), 50
    program = _exported(tried)
    run = compile_program(program.program)
    times = []
    with torch.inference_mode():
        for _ in range(100):
            began = time.perf_counter()
            run(program.weights, [x])
            times.append(time.perf_counter() - began)
    return _exported(max(1, round(tried * seconds / median(times))))


def _exported(count: int) -> Exported:
    return export(Layers(count), {"x": torch.zeros(2, ROWS, WIDTH)}, {"x": {0: "batch"}})


async def dispatch(rounds: int, turn: int) -> dict[str, list[float]]:
    """Return the seconds of runs in this process, through a worker, and through an executor."""
    made = made_for(MODEL_S)
    packaged = package("layers", made.program, made.weights, settings=Settings(device="pool"))
    program = compile_program(made.program)

    async def here(inputs: Mapping[str, torch.Tensor]) -> TimedAnswer:
        with torch.inference_mode():
            began = time.perf_counter()
            (answer,) = program(made.weights, list(inputs.values()))
            took = time.perf_counter() - began
        return TimedAnswer(took, (answer.numpy().tobytes(),))

    async with direct_processes(DEVICE, packaged) as bench:
        [function] = bench.functions
        worker, executor = await bench.start_worker(function), await bench.start_executor()
        targets = {
            IN_PROCESS: here,
            "through a worker": partial(bench.in_worker, worker),
            IN_EXECUTOR: partial(bench.on_device, executor, function),
        }
        times: dict[str, list[float]] = {name: [] for name in targets}
        for begun in range(0, rounds + WARM, turn):
            inputs = [{"x": torch.randn(1, ROWS, WIDTH)} for _ in range(turn)]
            outputs = set()
            for name, run in targets.items():
                answered = [await run(each) for each in inputs]
                outputs.add(tuple(each.outputs for each in answered))
                if begun >= WARM:
                    times[name] += [each.seconds for each in answered]
            if len(outputs) > 1:
                raise RuntimeError("a worker or an executor gives other outputs than the program in this process")
    return times


def measure(rounds: int) -> dict[str, float]:
    """Print the quantiles of each way, in both kinds of turns; return what an executor adds at the median, in
    milliseconds.
    """
    added = {}
    for turn in TURNS:
        times = uvloop.run(dispatch(rounds, turn))
        print(f"in turns of {turn}" if turn > 1 else "one by one")
        for name, each in times.items():
            shown = "  ".join(f"p{round(100 * share)} {1e3 * quantile(each, share):.3f} ms" for share in SHOWN)
            print(f"{name:20} {shown}")
        added[turn] = 1e3 * (median(times[IN_EXECUTOR]) - median(times[IN_PROCESS]))
    return {"dispatch_ms": added[TURNS[0]], "dispatch_cold_ms": added[TURNS[-1]]}

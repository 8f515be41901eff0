"""Runs models on an NVIDIA GPU while their blocks are still being transferred to it.

`python -m benchmarks.gpu_swap [model ...]` measures the first GPU of this machine. It compares requests, including the
copies of inputs and answers:

* native: eager PyTorch, with all weights on the GPU;
* resident: the program on a device that has all blocks;
* whole, by weight, grouped: the blocks are brought before the run, each weight by itself, or in groups of the measured
  elbow's size, the first ones smaller;
* beside a sibling: a variant with another head, on a device that has its sibling.

The control of the transfers is one copy of as many bytes from pinned memory in the same turns. Then the same requests
go through an executor, a contained process, which is started, gets the function, loses its blocks and has them again.
All answers are compared with eager PyTorch on the same GPU, bit for bit.
"""

import argparse
import copy
import gc
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import uvloop

from benchmarks.measure import MIB, print_result
from benchmarks.pool.direct import direct_processes
from benchmarks.programs import flatten
from benchmarks.swap import BY_WEIGHT, WHOLE, Model, Stored, allocator_for, alternating, link_of, run_once, swap_once
from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import Address, DeviceId, TenantId
from overwinter.device.cuda import CudaDevice
from overwinter.device.swap import Route, SwapSettings, elbow, transfer_times

MODELS = ("resnet50", "resnet152", "bert-base", "bert-large", "gpt2")
SIZES = tuple(1 << power for power in range(16, 28))
DEVICE = DeviceConfig(name=DeviceId("cuda:0"), kind="cuda", memory_bytes=4 << 30)
TENANT = TenantId("benchmark")


def device_for(name: str, nbytes: int) -> CudaDevice:
    """Make a device on which these bytes fit."""
    return CudaDevice(name, allocator_for(nbytes))


def route_to(device: CudaDevice, host: Mapping[Address, torch.Tensor]) -> Route:
    """Return the route of registered blocks in host memory to a GPU, which uses its own link, not the modelled one."""
    return Route(device.host(host), link_of(1e12, 0.0))


def measure_elbow(rounds: int) -> int:
    """Measure transfers of several sizes; print their shares of the best throughput, and return the elbow."""
    block = Address("0" * 64)
    device = device_for("elbow", SIZES[-1])
    device.hold("elbow", TENANT, {block: SIZES[-1]})
    content = torch.randint(0, 255, (SIZES[-1],), dtype=torch.uint8)
    times = transfer_times(device, route_to(device, {block: content}), block, SIZES, time.perf_counter, rounds)
    device.close()
    found = elbow(times)
    best = max(nbytes / seconds for nbytes, seconds in times.items())
    for nbytes, seconds in times.items():
        mark = "  elbow" if nbytes == found else ""
        print(f"{nbytes / MIB:9.4g} MiB {nbytes / seconds / 1e9:7.2f} GB/s {nbytes / seconds / best:6.1%}{mark}")
    return found


def native(model: Model) -> tuple[Callable[[], list[torch.Tensor]], torch.nn.Module]:
    """Return a request to eager PyTorch on the GPU, and its module."""
    module = copy.deepcopy(model.family.module).cuda()
    one = model.family.one()

    def request() -> list[torch.Tensor]:
        with torch.inference_mode():
            outputs = flatten(module(**{name: each.cuda() for name, each in one.items()}))
            return [each.cpu() for each in outputs]

    return request, module


def stored_with_answer(model: Model, variant: int = 0) -> Stored:
    """Store a variant, with the answer of eager PyTorch on the GPU."""
    stored = model.stored(variant)
    model.family.vary(model.family.head(), variant)
    request, _ = native(model)
    answer = request()
    model.family.vary(model.family.head(), 0)
    return stored._replace(answer=answer)


def measure_model(model: Model, group_bytes: int, rounds: int) -> dict[str, float]:
    """Measure one row of the first table: seconds, the bytes of all blocks, and the ratio `over expected`."""
    stored, (request, module) = stored_with_answer(model), native(model)
    nbytes = stored.function.nbytes
    device = device_for("a", nbytes)
    host = [route_to(device, stored.host)]
    grouped = SwapSettings(group_bytes)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def timed(work: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            return time.perf_counter() - began

        return measure

    def resident() -> float:
        run_once(device, stored, host, WHOLE)
        return run_once(device, stored, host, WHOLE)[0]

    row = alternating(
        {
            "native": timed(request),
            "resident": resident,
            "whole": lambda: swap_once(device, stored, host, WHOLE),
            "by weight": lambda: swap_once(device, stored, host, BY_WEIGHT),
            "grouped": lambda: swap_once(device, stored, host, grouped),
            "pinned": timed(lambda: target.copy_(pinned, non_blocking=True)),
        },
        rounds,
    )
    device.close()
    del module
    row["transfer"] = row["whole"] - row["resident"]
    row["bytes"] = nbytes
    first = max(next(iter(stored.function.blocks.values())), group_bytes)
    row["over expected"] = row["grouped"] / (max(row["transfer"], row["resident"]) + first * row["pinned"] / nbytes)
    return row


def measure_sibling(model: Model, group_bytes: int, rounds: int) -> dict[str, float]:
    """Bring a variant to a device that has its sibling, and to an empty one."""
    base, variant = stored_with_answer(model), stored_with_answer(model, 1)
    device = device_for("a", base.function.nbytes + variant.function.nbytes)
    host, grouped = [route_to(device, {**base.host, **variant.host})], SwapSettings(group_bytes)
    moved: dict[bool, int] = {}

    def brought(beside: bool) -> float:
        for each in (base, variant):
            device.evict(each.function.name)
        if beside:
            run_once(device, base, host, WHOLE)
        took, moved[beside] = run_once(device, variant, host, grouped)
        return took

    row = alternating({"alone": lambda: brought(beside=False), "sibling": lambda: brought(beside=True)}, rounds)
    device.close()
    return {"moved": moved[True], "share": moved[True] / moved[False], "time": row["sibling"] / row["alone"]}


async def through_executor(models: list[Model], rounds: int) -> dict[str, dict[str, float]]:
    """Send requests to an executor in turns with native ones; return the seconds of each step by model."""
    packages = [model.family.packaged(model.name, device="pool") for model in models]
    found: dict[str, dict[str, list[float]]] = {model.name: {} for model in models}
    async with direct_processes(DEVICE, *packages) as bench:
        await bench.stop(await bench.start_executor())
        for model, function in zip(models, bench.functions, strict=True):
            (request, module), inputs = native(model), model.family.one()
            expected = tuple(each.contiguous().numpy().tobytes() for each in request())
            steps = found[model.name]
            began = time.perf_counter()
            executor = await bench.start_executor()
            steps["start"] = [time.perf_counter() - began]
            steps["first"] = [(await bench.on_device(executor, function, inputs)).seconds]
            for _ in range(rounds):
                began = time.perf_counter()
                request()
                steps.setdefault("native", []).append(time.perf_counter() - began)
                again = await bench.on_device(executor, function, inputs, evict=(function,))
                resident = await bench.on_device(executor, function, inputs)
                steps.setdefault("again", []).append(again.seconds)
                steps.setdefault("resident", []).append(resident.seconds)
                if not again.outputs == resident.outputs == expected:
                    raise RuntimeError(f"{model.name} answers wrongly in an executor")
            await bench.stop(executor)
            del module
    return {name: {step: median(seconds) for step, seconds in steps.items()} for name, steps in found.items()}


def print_models(models: list[Model], group_bytes: int, rounds: int) -> dict[str, Any]:
    print("\nmilliseconds; `over exp.`: grouped over the larger of transfer and resident run, plus a group of the")
    print("elbow's size; GB/s: of the transfer of all blocks, and its share of a copy of as many bytes from pinned")
    print("memory")
    titles = ("MB", "native", "resident", "whole", "by weight", "grouped", "transfer", "over exp.", "GB/s", "of pinned")
    print(f"{'model':12}" + "".join(f"{title:>10}" for title in titles))
    figures: dict[str, Any] = {"over_limit": {}, "resident_over_native": {}, "bandwidth_over_pinned": {}, "ms": {}}
    for model in models:
        row = measure_model(model, group_bytes, rounds)
        steps = ("native", "resident", "whole", "by weight", "grouped", "transfer")
        share = row["pinned"] / row["transfer"]
        print(
            f"{model.name:12}{row['bytes'] / 1e6:10.1f}"
            + "".join(f"{row[step] * 1e3:10.2f}" for step in steps)
            + f"{row['over expected']:10.2f}{row['bytes'] / row['transfer'] / 1e9:10.2f}{share:10.1%}",
            flush=True,
        )
        figures["over_limit"][model.name] = row["over expected"]
        figures["resident_over_native"][model.name] = row["resident"] / row["native"]
        figures["bandwidth_over_pinned"][model.name] = share
        figures["ms"][model.name] = {step: row[step] * 1e3 for step in steps}
        gc.collect()
        torch.cuda.empty_cache()
    return figures


def print_siblings(models: list[Model], group_bytes: int, rounds: int) -> dict[str, float]:
    print(f"\na variant beside its sibling\n{'model':12}{'MB moved':>10}{'of all':>10}{'time':>10}")
    shares = {}
    for model in models:
        row = measure_sibling(model, group_bytes, rounds)
        shares[model.name] = row["share"]
        print(f"{model.name:12}{row['moved'] / 1e6:10.2f}{row['share']:10.1%}{row['time']:10.2f}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print("time: divided by that on an empty device")
    return shares


def print_executor(models: list[Model], rounds: int) -> dict[str, dict[str, float]]:
    print("\nthrough an executor, milliseconds")
    steps = ("native", "resident", "again", "first", "start")
    titles = ("native", "resident", "swapped", "first", "start")
    print(f"{'model':12}" + "".join(f"{title:>10}" for title in (*titles, "over nat.")))
    found = uvloop.run(through_executor(models, rounds))
    for name, row in found.items():
        text = "".join(f"{row[step] * 1e3:10.2f}" for step in steps)
        print(f"{name:12}{text}{row['resident'] / row['native']:10.2f}", flush=True)
    return {name: {step: row[step] * 1e3 for step in steps} for name, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", default=MODELS, help="models of the zoo")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each figure; default 10")
    parser.add_argument("--only", choices=("models", "siblings", "executor"), help="measure only one table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"PyTorch {torch.__version__} finds no GPU on this machine")
    # Every CUDA device sets this too; eager PyTorch is to compute the same bits.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    models = [Model(name, torch.device("cuda", 0)) for name in options.models]
    figures: dict[str, Any] = {}
    if options.only != "executor":
        group_bytes = measure_elbow(options.rounds)
        figures["elbow_mib"] = group_bytes / MIB
    if options.only in (None, "models"):
        figures |= print_models(models, group_bytes, options.rounds)
    if options.only in (None, "siblings"):
        figures["sibling_bytes_share"] = print_siblings(models, group_bytes, options.rounds)
    if options.only in (None, "executor"):
        figures["executor_ms"] = print_executor(models, options.rounds)
    print_result(figures)


if __name__ == "__main__":
    main()

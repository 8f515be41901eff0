"""Measures the facts about an NVIDIA GPU on which the pool of devices depends.

`python -m benchmarks.gpu_probe [model ...]` measures, on the first GPU of this machine:

* the start of a process up to its first answer on the GPU, alone and forked from a process that has imported PyTorch,
  and the memory that its context takes;
* transfers from the host, 64 KiB to 256 MiB, from a file in memory that is registered in place, from pinned and from
  pageable memory, the elbow of each, and how long each transfer blocks its caller;
* the time to register memory, and which flags of cudaHostRegister this system accepts;
* a storage for each block in one arena, and its bounds;
* for each model, one request on the GPU: eager PyTorch, the program, and a CUDA graph of the program, with the
  microseconds that each call takes to start.

The processes are started before this one uses the GPU, because the memory that they report would include this process's
context.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch

from benchmarks.measure import MIB, print_result
from benchmarks.programs import flatten
from overwinter.device.swap import elbow
from overwinter.model.compile import compile_program

MODELS = ("resnet50", "resnet152", "bert-base", "bert-large", "gpt2")
SIZES = tuple(1 << power for power in range(16, 29, 2))
ROUNDS = 20
REGISTERED_BYTES = 512 * MIB
BLOCK_BYTES = MIB
FLAGS = {"none": 0, "portable": 1, "read-only": 8, "portable, read-only": 9}
"""Flags of cudaHostRegister."""

STEPS = """
import json, os, sys, time
marks = [time.perf_counter()]
import torch
marks.append(time.perf_counter())
{fork}
torch.cuda.init()
torch.empty(1, device="cuda")
marks.append(time.perf_counter())
free, total = torch.cuda.mem_get_info()
with torch.inference_mode():
    rows = torch.ones(64, 64, device="cuda")
    (rows @ rows).cpu()
    marks.append(time.perf_counter())
    image = torch.ones(1, 3, 64, 64, device="cuda")
    torch.nn.functional.conv2d(image, torch.ones(8, 3, 3, 3, device="cuda")).cpu()
    marks.append(time.perf_counter())
left, _ = torch.cuda.mem_get_info()
held = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("VmSize", "VmData", "VmRSS")))
kib = {{key: int(value.split()[0]) for key, value in held.items()}}
print(json.dumps([[b - a for a, b in zip(marks, marks[1:])], total - free, total - left, kib]), flush=True)
"""
"""A process up to its first answers: the import of PyTorch, the context, a product of matrices, a convolution."""

FORK = """
if os.fork():
    os.wait()
    os._exit(0)
marks[1] = time.perf_counter()
"""


def timed(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return the median time of this work with all that it starts on the GPU, in seconds, after a warm-up."""
    taken = []
    for each in range(rounds + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if each >= 3:
            taken.append(time.perf_counter() - began)
    return median(taken)


def started(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return the median time until this work has been started on the GPU, in seconds."""
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return median(taken)


def measure_start() -> dict[str, float]:
    """Start processes, print their steps, and return the figures."""
    figures: dict[str, float] = {}
    print(f"{'process':10}{'import':>10}{'context':>10}{'matrices':>10}{'conv':>10}   s")
    for name, fork in (("alone", ""), ("forked", FORK)):
        code = STEPS.format(fork=fork)
        rows = []
        for _ in range(3):
            said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(said))
        steps = [median(each) for each in zip(*(row[0] for row in rows), strict=True)]
        print(f"{name:10}" + "".join(f"{each:10.3f}" for each in steps))
        figures[f"{name}_s"] = sum(steps) if name == "alone" else sum(steps[1:])
        figures["context_mib"], figures["used_mib"] = rows[0][1] / MIB, rows[0][2] / MIB
        figures |= {f"{key}_gib": kib / (1 << 20) for key, kib in rows[0][3].items()}
    print(f"a context takes {figures['context_mib']:.0f} MiB of the GPU, {figures['used_mib']:.0f} after both answers;")
    print("its process " + ", ".join(f"{key} {figures[f'{key}_gib']:.1f} GiB" for key in ("VmSize", "VmData", "VmRSS")))
    return figures


def mapped_file(nbytes: int, writable: bool = False) -> tuple[torch.Tensor, mmap.mmap]:
    """Return a file in memory, mapped as the executors map blocks: shared, and read-only unless `writable`."""
    fd = os.memfd_create("overwinter-probe")
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as filled:
        filled[:] = os.urandom(MIB) * (nbytes // MIB)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection)
    os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8), mapped


def register(content: torch.Tensor, flags: int) -> int:
    """Register memory; return 0 or CUDA's error."""
    result = int(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.nbytes, flags))
    if result:
        # CUDA reports it again to the next kernel, which fails although nothing is wrong with it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return result


def measure_registration() -> tuple[int | None, dict[str, float]]:
    """Try the flags on memory that is mapped read-only, and measure registration with the best ones, or of writable
    memory if none is accepted. Return the best flags (None if none is accepted) and the figures.
    """
    print("\nregistering memory that is mapped read-only")
    best: int | None = None
    for name, flags in FLAGS.items():
        content, mapped = mapped_file(16 * MIB)
        result = register(content, flags)
        print(f"{name:20} {'accepted' if result == 0 else f'refused: error {result}'}")
        if result == 0:
            best = flags if best is None or name == "portable, read-only" else best
            torch.cuda.cudart().cudaHostUnregister(content.data_ptr())
        del content, mapped
    content, _ = mapped_file(16 * MIB, writable=True)
    result = register(content, 1)
    print(f"{'(writable) portable':20} {'accepted' if result == 0 else f'refused: error {result}'}")
    if result == 0:
        torch.cuda.cudart().cudaHostUnregister(content.data_ptr())
    support = ctypes.c_int(-1)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(support), 113, 0)
    print(f"attribute of the device, read-only registration: {support.value}")
    figures: dict[str, float] = {"read_only_supported": support.value}
    whole, kept = mapped_file(REGISTERED_BYTES, writable=best is None)
    flags = 1 if best is None else best
    began = time.perf_counter()
    accepted = register(whole, flags) == 0
    figures["register_s_per_gb"] = (time.perf_counter() - began) * 1e9 / REGISTERED_BYTES
    if accepted:
        began = time.perf_counter()
        torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())
        figures["unregister_s_per_gb"] = (time.perf_counter() - began) * 1e9 / REGISTERED_BYTES
    parts = whole.split(BLOCK_BYTES)
    began = time.perf_counter()
    done = [register(part, flags) == 0 for part in parts]
    figures["register_blocks_s_per_gb"] = (time.perf_counter() - began) * 1e9 / REGISTERED_BYTES
    for part, ok in zip(parts, done, strict=True):
        if ok:
            torch.cuda.cudart().cudaHostUnregister(part.data_ptr())
    target = torch.empty(REGISTERED_BYTES, dtype=torch.uint8, pin_memory=True)
    target.copy_(whole)
    began = time.perf_counter()
    target.copy_(whole)
    figures["memcpy_gb_per_s"] = REGISTERED_BYTES / (time.perf_counter() - began) / 1e9
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    target.copy_(whole)
    figures["memcpy_one_thread_gb_per_s"] = REGISTERED_BYTES / (time.perf_counter() - began) / 1e9
    torch.set_num_threads(threads)
    for name, value in figures.items():
        print(f"{name:32}{value:10.3f}")
    del whole, kept, parts, target
    return best, figures


def measure_transfers(flags: int | None) -> dict[str, Any]:
    """Measure transfers from each kind of host memory; print the table and return the figures."""
    target = torch.zeros(SIZES[-1], dtype=torch.uint8, device="cuda")
    pageable, kept = mapped_file(SIZES[-1])
    registered, held = mapped_file(SIZES[-1], writable=flags is None)
    sources = {"pageable": pageable, "pinned": torch.ones(SIZES[-1], dtype=torch.uint8, pin_memory=True)}
    if register(registered, 1 if flags is None else flags) == 0:
        sources["registered" if flags is not None else "registered writable"] = registered
    stream = torch.cuda.Stream()
    print(
        f"\n{'transfer':>12}" + "".join(f"{name:>22}" for name in sources) + "   GB/s (time until the call returns, us)"
    )
    times: dict[str, dict[int, float]] = {name: {} for name in sources}
    for nbytes in SIZES:
        row = f"{nbytes / MIB:8.4g} MiB"
        for name, source in sources.items():

            def copy(source: torch.Tensor = source, nbytes: int = nbytes) -> None:
                with torch.cuda.stream(stream):
                    target[:nbytes].copy_(source[:nbytes], non_blocking=True)

            seconds = timed(copy)
            times[name][nbytes] = seconds
            row += f"{nbytes / seconds / 1e9:12.2f} ({started(copy) * 1e6:7.0f})"
        print(row, flush=True)
    elbows = {name: elbow(each) / MIB for name, each in times.items()}
    print("elbow, MiB: " + ", ".join(f"{name} {each:g}" for name, each in elbows.items()))
    figures = {
        "gb_per_s": {name: max(size / each for size, each in by_size.items()) / 1e9 for name, by_size in times.items()},
        "elbow_mib": elbows,
    }
    if "registered" in sources or flags is None:
        with suppress(RuntimeError):
            torch.cuda.cudart().cudaHostUnregister(registered.data_ptr())
    many = _many_transfers(target, sources["pinned"], stream)
    print("4 MiB from pinned memory: " + ", ".join(f"{name} {each:.1f} us" for name, each in many.items()))
    del kept, held
    return {**figures, "blocks_us": many}


def _many_transfers(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> dict[str, float]:
    """Return the microseconds of 4 MiB in one copy, and in 64 copies that are ordered one after the other."""
    nbytes, parts = 4 * MIB, 64

    def copy(count: int) -> None:
        with torch.cuda.stream(stream):
            each = nbytes // count
            for at in range(count):
                target[at * each : (at + 1) * each].copy_(source[at * each : (at + 1) * each], non_blocking=True)

    return {f"{count} copies": timed(lambda count=count: copy(count)) * 1e6 for count in (1, parts)}  # type: ignore[misc]


def measure_storages() -> dict[str, float]:
    """Make a storage for each block of an arena; check its bounds, and return the time of each."""
    arena = torch.arange(1 << 20, dtype=torch.uint8, device="cuda")
    blocks, nbytes = 1024, 1024
    began = time.perf_counter()
    storages = [
        torch._C._construct_storage_from_data_pointer(arena.data_ptr() + at * nbytes, arena.device, nbytes)
        for at in range(blocks)
    ]
    tensors = [torch.empty(0, dtype=torch.uint8, device="cuda").set_(each, 0, (nbytes,)) for each in storages]
    took = time.perf_counter() - began
    same = all(torch.equal(each, arena[at * nbytes : (at + 1) * nbytes]) for at, each in enumerate(tensors))
    refused = 0
    for attempt in (
        lambda: tensors[0].as_strided((nbytes + 1,), (1,)),
        lambda: tensors[0].as_strided((1,), (1,), nbytes),
        lambda: tensors[0].resize_(nbytes + 1),
    ):
        try:
            attempt()
        except RuntimeError:
            refused += 1
    print(f"\na storage per block: {took / blocks * 1e6:.1f} us each, bytes {'right' if same else 'WRONG'}")
    print(f"{refused} of 3 attempts to leave its bounds refused")
    return {"storage_us": took / blocks * 1e6, "right": float(same), "bounds_refused": refused}


def measure_model(name: str) -> dict[str, float]:
    """Run one request of a model in each way; print the row and return the figures."""
    from benchmarks.families import Family

    family = Family(name)
    one = {key: value.cuda() for key, value in family.one().items()}
    inputs = [one[spec.name] for spec in family.program.inputs]
    weights = [each.cuda() for each in family.weights]
    module = family.module.cuda()
    program = compile_program(family.program, device="cuda")
    figures: dict[str, float] = {"calls": len(family.program.calls)}
    with torch.inference_mode():
        expected = flatten(module(**one))
        figures["eager_ms"] = timed(lambda: module(**one)) * 1e3
        figures["program_ms"] = timed(lambda: program(weights, inputs)) * 1e3
        figures["eager_start_ms"] = started(lambda: module(**one)) * 1e3
        figures["program_start_ms"] = started(lambda: program(weights, inputs)) * 1e3
        got = program(weights, inputs)
        figures["differs"] = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))
        with suppress(RuntimeError):
            figures["graph_ms"] = _graph_s(lambda: program(weights, inputs)) * 1e3
    calls = figures["calls"]
    print(
        f"{name:12}{calls:6.0f}{figures['eager_ms']:10.3f}{figures['program_ms']:10.3f}"
        f"{figures.get('graph_ms', float('nan')):10.3f}{figures['program_ms'] / figures['eager_ms']:10.2f}"
        f"{figures['eager_start_ms'] / calls * 1e3:10.2f}{figures['program_start_ms'] / calls * 1e3:10.2f}"
        f"{figures['differs']:12.2g}",
        flush=True,
    )
    return figures


def _graph_s(run: Callable[[], Any]) -> float:
    """Return the time of a replayed CUDA graph of this work."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return timed(graph.replay)


def measure_models(names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Measure each model; one that fails is named, and the others go on."""
    print("\none request; ms, and microseconds until each call was started")
    titles = ("calls", "eager", "program", "graph", "program/e", "eager us", "prog. us", "differs")
    print(f"{'model':12}{titles[0]:>6}" + "".join(f"{title:>10}" for title in titles[1:-1]) + f"{titles[-1]:>12}")
    measured = {}
    for name in names:
        try:
            measured[name] = measure_model(name)
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            print(f"{name:12} failed: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", default=MODELS, help="models of the zoo")
    options = parser.parse_args()
    if not torch.backends.cuda.is_built():
        parser.error(f"PyTorch {torch.__version__} was built without CUDA; install a build with it")
    figures: dict[str, Any] = {"start": measure_start()}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"\n{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads")
    flags, figures["registration"] = measure_registration()
    figures["transfers"] = measure_transfers(flags)
    figures["storages"] = measure_storages()
    figures["models"] = measure_models(options.models)
    print_result(figures)


if __name__ == "__main__":
    main()

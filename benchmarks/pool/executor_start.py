"""Measures the start of an executor until its first answer: what isolation by function costs when a function gets a
device (Torpor, runtime isolation).

Executors are forked from the zygote, which has imported the libraries. They are compared with a new process that
imports them and reserves the same device. The first run in an executor is compared with the first in one that has
prepared the function (otherwise the first run compiles the program, and its operators prepare what they need), with a
run whose blocks are brought again, and with a run whose blocks are there.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import msgspec
import uvloop

from benchmarks.families import Family
from benchmarks.pool.direct import DirectProcesses, direct_processes
from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import DeviceId, FunctionId
from overwinter.server import ZYGOTE_ENVIRONMENT

MODELS = ("mobilenet-v2", "resnet50", "minilm", "bert-base")
DEVICE = DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=512 << 20)
ROUNDS, NEW_PROCESS_ROUNDS = 10, 3
NEW_PROCESS = """
import sys
import msgspec
import torch
from overwinter.core.devices import DeviceConfig
from overwinter.worker.own_device import reserve_device
torch.set_num_threads(1)
reserve_device(msgspec.json.decode(sys.argv[1], type=DeviceConfig))
print("ready", flush=True)
sys.stdin.read()
"""


def new_process_s(device: DeviceConfig) -> float:
    """Return the seconds until a new process has imported the libraries and reserved the device."""
    began = time.perf_counter()
    command = [sys.executable, "-c", NEW_PROCESS, msgspec.json.encode(device)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ZYGOTE_ENVIRONMENT | _paths()
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("a new process cannot reserve a device")
        return time.perf_counter() - began


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(filter(None, sys.path))}


async def rounds_of(
    models: Sequence[str], rounds: int, device: DeviceConfig, small: bool
) -> dict[str, list[list[float]]]:
    """Return the seconds of each step, of each model: the start, the first run, one after an eviction, one resident,
    the preparation in another executor, and the first run there.
    """
    families = [Family(name, tokens=16, small=small) for name in models]
    packages = [each.packaged(each.name, device="pool") for each in families]
    found: dict[str, list[list[float]]] = {name: [] for name in models}
    async with direct_processes(device, *packages) as bench:
        # The first executor waits for the zygote.
        await bench.stop(await bench.start_executor())
        for _ in range(rounds):
            for family, function in zip(families, bench.functions, strict=True):
                found[family.name].append(await _steps(bench, family, function))
    return found


async def _steps(bench: DirectProcesses, family: Family, function: FunctionId) -> list[float]:
    inputs = family.one()
    began = time.perf_counter()
    executor = await bench.start_executor()
    started = time.perf_counter() - began
    first = await bench.on_device(executor, function, inputs)
    again = await bench.on_device(executor, function, inputs, evict=(function,))
    resident = await bench.on_device(executor, function, inputs)
    await bench.stop(executor)
    executor = await bench.start_executor()
    began = time.perf_counter()
    await bench.prepare(executor, function)
    preparing = time.perf_counter() - began
    prepared = await bench.on_device(executor, function, inputs)
    await bench.stop(executor)
    if not first.outputs == again.outputs == resident.outputs == prepared.outputs:
        raise RuntimeError(f"{family.name} gives another answer after an eviction or a preparation")
    return [started, first.seconds, again.seconds, resident.seconds, preparing, prepared.seconds]


def measure(rounds: int = ROUNDS, models: Sequence[str] = MODELS, small: bool = False) -> dict[str, float]:
    """Print the median of each step; return the figures in milliseconds."""
    fresh = median(new_process_s(DEVICE) for _ in range(NEW_PROCESS_ROUNDS))
    found = uvloop.run(rounds_of(models, rounds, DEVICE, small))
    starts = median(row[0] for rows in found.values() for row in rows)
    print(f"an executor of {DEVICE.memory_bytes >> 20} MiB is ready after {1e3 * starts:.1f} ms, and")
    print(f"a new process after {1e3 * fresh:.1f} ms, so a fork saves {1e3 * (fresh - starts):.1f} ms")
    header = f"{'ms':16} {'first answer':>13} {'first run':>10} {'after eviction':>15} {'resident':>9}"
    print(f"{header} {'preparation':>12} {'then first':>11}")
    for name, rows in found.items():
        started, first, again, resident, preparing, prepared = (1e3 * median(step) for step in zip(*rows, strict=True))
        print(f"{name:16} {started + first:13.1f} {first:10.1f} {again:15.1f} {resident:9.1f}", end="")
        print(f" {preparing:12.1f} {prepared:11.1f}")
    answers = [sum(row[:2]) for rows in found.values() for row in rows]
    return {
        "first_answer_ms": 1e3 * median(answers),
        "start_ms": 1e3 * starts,
        "fork_saves_ms": 1e3 * (fresh - starts),
        "first_run_ms": 1e3 * median(row[1] - row[2] for rows in found.values() for row in rows),
        "prepared_run_ms": 1e3 * median(row[5] - row[2] for rows in found.values() for row in rows),
    }

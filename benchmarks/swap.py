"""Runs models on a virtual accelerator while their blocks are still being transferred to it.

`python -m benchmarks.swap [model ...]` compares a run of a resident model with runs that bring its blocks: all before
the run, each weight by itself, in groups (of the measured elbow's size, the first ones smaller), and from another
device. The control is the resident model while the same bytes are copied elsewhere, since the copies take caches and
memory bandwidth of the CPU. Then a heavy model is brought to two devices at once, over two switches and over one, and a
variant is brought to a device that has its sibling, and to one that has an unrelated model. All answers are compared
with plain PyTorch, bit for bit.

The links are simulated, and slow enough that a transfer takes about as long as a run on one core of a CPU: 1 GB/s with
0.1 ms per transfer from the host, 4 GB/s with 0.02 ms from the other device.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.families import Family
from benchmarks.programs import flatten
from overwinter.core.ids import Address, TenantId
from overwinter.device.function import DeviceFunction, DeviceProgram
from overwinter.device.host import HostBlocks
from overwinter.device.interface import Copy, CopyPath, Device, FoundBlocks
from overwinter.device.link import Link, Switch
from overwinter.device.partitioned import PARTITION_BYTES, PartitionedAllocator
from overwinter.device.peer import PeerMemory
from overwinter.device.shared import shared_memory
from overwinter.device.swap import Route, SwapSettings, elbow, run, transfer_times
from overwinter.device.virtual import VirtualDevice
from overwinter.store.manifest import weight_positions

HOST_BYTES_PER_S, HOST_LATENCY_S = 1e9, 1e-4
PEER_BYTES_PER_S, PEER_LATENCY_S = 4e9, 2e-5
TENANT = TenantId("benchmark")
MODELS = (
    "resnet50",
    "resnet152",
    "densenet201",
    "inception-v3",
    "mobilenet-v2",
    "vgg16",
    "bert-base",
    "minilm",
    "gpt2",
)
HEAVY = "vgg16"
UNRELATED = "mlp"
SIBLINGS = ("resnet50", "minilm")
SIZES = tuple(1 << power for power in range(16, 26))
WHOLE = SwapSettings(1 << 62, overlaps=False)
BY_WEIGHT = SwapSettings(0, by_weight=True)


class Stored(NamedTuple):
    """A function with its blocks in host memory, and what plain PyTorch answers."""

    function: DeviceFunction
    host: dict[Address, torch.Tensor]
    inputs: list[torch.Tensor]
    answer: list[torch.Tensor]


class Model:
    """A model of the zoo and variants of it."""

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        """`device`: where it runs, if not on the CPU."""
        self.name = name
        self.family = Family(name)
        self.program = DeviceProgram(self.family.program, device or torch.device("cpu"))

    def stored(self, variant: int = 0) -> Stored:
        """Store a variant with another head; 0 is the original."""
        self.family.vary(self.family.head(), variant)
        packaged = self.family.packaged(f"{self.name}-{variant}")
        blocks = packaged.manifest.blocks
        contents = {block.address: bytearray(packaged.contents[block.address]()) for block in blocks}
        host = {address: torch.frombuffer(content, dtype=torch.uint8) for address, content in contents.items()}
        one = self.family.one()
        with torch.inference_mode():
            answer = [output.clone() for output in flatten(self.family.module(**one))]
        inputs = [one[spec.name] for spec in self.program.program.inputs]
        self.family.vary(self.family.head(), 0)
        function = DeviceFunction(packaged.manifest.name, TENANT, self.program, weight_positions(blocks))
        return Stored(function, host, inputs, answer)


def allocator_for(nbytes: int) -> PartitionedAllocator:
    """Return an allocator for these bytes, with additional memory for fragmentation."""
    return PartitionedAllocator((nbytes * 5 // 4 // PARTITION_BYTES + 3) * PARTITION_BYTES)


def device_for(name: str, nbytes: int) -> VirtualDevice:
    """Make a device on which these bytes fit."""
    return VirtualDevice(name, allocator_for(nbytes))


def device_and_memory(name: str, nbytes: int) -> tuple[VirtualDevice, PeerMemory]:
    """Make a device from which others may copy, with its memory as they see it."""
    allocator = allocator_for(nbytes)
    fd = shared_memory(allocator.nbytes)
    made = VirtualDevice(name, allocator, fd), PeerMemory(fd)
    os.close(fd)
    return made


def link_of(bytes_per_s: float, latency_s: float, switch: Switch | None = None) -> Link:
    """Return a link of this speed."""
    return Link(bytes_per_s, time.perf_counter, time.sleep, latency_s, switch)


def host_route(host: Mapping[Address, torch.Tensor], switch: Switch | None = None) -> Route:
    """Return the route of these blocks in host memory to a device."""
    return Route(HostBlocks(host), link_of(HOST_BYTES_PER_S, HOST_LATENCY_S, switch))


def run_once(device: Device, stored: Stored, routes: Sequence[Route], swapping: SwapSettings) -> tuple[float, int]:
    """Run once; return its time and the bytes moved. Raises RuntimeError if the answer is not plain PyTorch's."""
    began = time.perf_counter()
    outputs, moved = run(device, stored.function, stored.inputs, routes, swapping)
    took = time.perf_counter() - began
    if len(outputs) != len(stored.answer) or not all(map(torch.equal, outputs, stored.answer)):
        raise RuntimeError(f"{stored.function.name} answers wrongly after a swap")
    return took, sum(moved)


def swap_once(device: Device, stored: Stored, routes: Sequence[Route], swapping: SwapSettings) -> float:
    """Run once with no block of the function on the device."""
    device.evict(stored.function.name)
    return run_once(device, stored, routes, swapping)[0]


def alternating(measurements: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each measurement, taken in turns, after one round to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in measurements}
    for each in range(rounds + 1):
        for name, measure in measurements.items():
            took = measure()
            if each:
                taken[name].append(took)
    return {name: median(times) for name, times in taken.items()}


def measure_elbow(rounds: int) -> tuple[int, dict[int, float]]:
    """Measure transfers of several sizes over the host's link."""
    block = Address("0" * 64)
    device = device_for("a", SIZES[-1])
    device.hold("elbow", TENANT, {block: SIZES[-1]})
    route = host_route({block: torch.zeros(SIZES[-1], dtype=torch.uint8)})
    times = transfer_times(device, route, block, SIZES, time.perf_counter, rounds)
    device.close()
    return elbow(times), times


def measure_model(stored: Stored, group_bytes: int, rounds: int) -> dict[str, float]:
    """Measure one row of the table: seconds, and the ratios `over expected` and `over control`."""
    nbytes = stored.function.nbytes
    device, (peer, memory) = device_for("a", 2 * nbytes), device_and_memory("b", nbytes)
    host = [host_route(stored.host)]
    run_once(peer, stored, host, WHOLE)
    from_peer = [Route(memory, link_of(PEER_BYTES_PER_S, PEER_LATENCY_S))]
    grouped = SwapSettings(group_bytes)

    def resident() -> float:
        run_once(device, stored, host, WHOLE)
        return run_once(device, stored, host, WHOLE)[0]

    others = {Address(f"other {address}"): size for address, size in stored.function.blocks.items()}
    device.hold("other", TENANT, others)
    copies = [Copy(address, 0, size) for address, size in others.items()]
    contents = {other: stored.host[address] for other, address in zip(others, stored.function.blocks, strict=True)}
    route = CopyPath(FoundBlocks(contents), host[0].link)

    def beside_copies() -> float:
        run_once(device, stored, host, WHOLE)
        copied = device.copy(copies, [route])
        took, _ = run_once(device, stored, host, WHOLE)
        copied.wait()
        return took

    row = alternating(
        {
            "resident": resident,
            "beside copies": beside_copies,
            "whole": lambda: swap_once(device, stored, host, WHOLE),
            "by weight": lambda: swap_once(device, stored, host, BY_WEIGHT),
            "grouped": lambda: swap_once(device, stored, host, grouped),
            "peer": lambda: swap_once(device, stored, from_peer, grouped),
        },
        rounds,
    )
    device.close()
    peer.close()
    first = next(iter(stored.function.blocks.values()))
    row["transfer"] = row["whole"] - row["resident"]
    # This group has the elbow's size, although the first groups are smaller: so the expected time does not depend on
    # how groups are made.
    group_s = host[0].link.transfer_s(max(first, group_bytes))
    row["over expected"] = row["grouped"] / (max(row["transfer"], row["resident"]) + group_s)
    row["over control"] = row["grouped"] / (max(row["transfer"], row["beside copies"]) + group_s)
    return row


def measure_contention(stored: Stored, group_bytes: int, rounds: int) -> dict[str, float]:
    """Bring a heavy model to one device, to two at once over two switches, and to two at once over one.

    Two switches are the control: they show what it costs that both runs compute at the same time.
    """
    devices = [device_for(name, stored.function.nbytes) for name in "ab"]
    grouped = SwapSettings(group_bytes)
    pair = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))

    def at_once(switches: Sequence[Switch]) -> float:
        routes = [[host_route(stored.host, switch)] for switch in switches]
        return median(pair.map(lambda device, route: swap_once(device, stored, route, grouped), devices, routes))

    def switch() -> Switch:
        return Switch(HOST_BYTES_PER_S)

    row = alternating(
        {
            "alone": lambda: swap_once(devices[0], stored, [host_route(stored.host, switch())], grouped),
            "two switches": lambda: at_once([switch(), switch()]),
            "one switch": lambda: at_once([switch()] * 2),
        },
        rounds,
    )
    pair.shutdown()
    for device in devices:
        device.close()
    return row


def measure_sibling(model: Model, unrelated: Stored, group_bytes: int, rounds: int) -> dict[str, float]:
    """Bring a variant to a device that holds its sibling, and to one that holds an unrelated model."""
    base, variant = model.stored(), model.stored(1)
    device = device_for("a", sum(each.function.nbytes for each in (base, variant, unrelated)))
    grouped = SwapSettings(group_bytes)
    host = [host_route({**base.host, **variant.host, **unrelated.host})]
    moved: dict[str, int] = {}

    def beside(resident: Stored) -> float:
        for name in (base.function.name, variant.function.name, unrelated.function.name):
            device.evict(name)
        run_once(device, resident, host, WHOLE)
        took, moved[resident.function.name] = run_once(device, variant, host, grouped)
        return took

    row = alternating({"unrelated": lambda: beside(unrelated), "sibling": lambda: beside(base)}, rounds)
    device.close()
    nbytes = moved[base.function.name]
    return {**row, "moved": nbytes, "share": nbytes / moved[unrelated.function.name]}


def print_elbow(group_bytes: int, times: Mapping[int, float]) -> None:
    best = max(nbytes / seconds for nbytes, seconds in times.items())
    print("share of the best throughput, by the size of a transfer")
    for nbytes, seconds in times.items():
        mark = "  elbow" if nbytes == group_bytes else ""
        print(f"{nbytes / (1 << 20):9.4g} MiB {nbytes / seconds / best:8.1%}{mark}")


def print_model(name: str, nbytes: int, row: Mapping[str, float]) -> None:
    shown = ("beside copies", "whole", "by weight", "grouped", "peer")
    ratios = "".join(f"{row[kind] / row['resident']:12.2f}" for kind in shown)
    heavy = row["transfer"] / row["resident"]
    ratios_to_expected = f"{row['over expected']:12.2f}{row['over control']:12.2f}"
    print(f"{name:16}{nbytes / 1e6:8.1f}{ratios}{heavy:12.2f}{ratios_to_expected}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", default=MODELS, help="models of the zoo")
    parser.add_argument("--heavy", default=HEAVY, help="the model that is brought to two devices at once")
    parser.add_argument("--siblings", nargs="*", default=SIBLINGS, help="models whose variants are brought")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each figure; default 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    group_bytes, times = measure_elbow(options.rounds)
    print_elbow(group_bytes, times)
    print("\ntime of a run over that of the resident model; `transfer`: of the transfer alone; `over exp.`: grouped")
    print(
        "over the expected time, the larger of transfer and resident run, plus a group of the elbow's size;\n"
        "`to control`: the same with the control's run"
    )
    titles = ("control", "whole", "by weight", "grouped", "peer", "transfer", "over exp.", "to control")
    print(f"{'model':16}{'MB':>8}" + "".join(f"{title:>12}" for title in titles))
    over_limit, over_control, shares = {}, {}, {}
    for name in options.models:
        stored = Model(name).stored()
        row = measure_model(stored, group_bytes, options.rounds)
        print_model(name, stored.function.nbytes, row)
        over_limit[name] = round(row["over expected"], 3)
        over_control[name] = round(row["over control"], 3)
        gc.collect()
    both = measure_contention(Model(options.heavy).stored(), group_bytes, options.rounds)
    print(f"\n{options.heavy} on two devices at once, divided by alone: {both['two switches'] / both['alone']:.2f}")
    print(f"over two switches, {both['one switch'] / both['alone']:.2f} over one")
    print(f"\na variant with another head beside its sibling\n{'model':16}{'MB moved':>12}{'of all':>10}{'time':>10}")
    unrelated = Model(UNRELATED).stored()
    for name in options.siblings:
        row = measure_sibling(Model(name), unrelated, group_bytes, options.rounds)
        shares[name] = round(row["share"], 4)
        time_share = row["sibling"] / row["unrelated"]
        print(f"{name:16}{row['moved'] / 1e6:12.2f}{row['share']:10.1%}{time_share:10.2f}", flush=True)
        gc.collect()
    print("time: divided by that beside an unrelated model")
    figures = {
        "over_limit": over_limit,
        "sibling_bytes_share": shares,
        "elbow_mib": group_bytes / (1 << 20),
        "over_control": over_control,
        "one_switch_over_two": round(both["one switch"] / both["two switches"], 3),
    }
    print("RESULT " + json.dumps(figures))


if __name__ == "__main__":
    main()

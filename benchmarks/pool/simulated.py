"""Compares the simulator with a node of null devices: the same functions, rates, links and times of runs.

Null devices take the times of a profile that was measured on this machine, so more of them than the machine has cores
can run at once, and any difference is an error of the simulator. The functions are whole programs, have a handler that
takes 5 ms of a core, or are too large for a device. `live` sends requests over HTTP to a node; `simulated` draws other
arrivals at the same rates, for longer.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.families import Family
from benchmarks.openloop import Target, attainment, count_kinds
from benchmarks.pool.calls import TOKENS, Sent, deployed, payload, poisson, send
from benchmarks.pool.serving import LINK_BYTES_PER_S, PoolNode, devices, pool_node, scheduling
from benchmarks.thousand_report import slo_ms
from overwinter.api.client import Client
from overwinter.core.devices import DeviceConfig
from overwinter.core.function import Settings
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileOptions
from overwinter.node.device_fit import slices_for
from overwinter.simulation.models import MIB, Blocks, FunctionModel, HandlerModel
from overwinter.simulation.scenario import Scenario
from overwinter.simulation.workloads import Poisson
from overwinter.simulation.world import World

MODEL = "resnet50"
DEVICES = 4
MEMORY_BYTES = 512 << 20
FUNCTIONS = 40
LOADS = (0.2, 0.4, 0.6)
"""The load of the devices, if each request takes as long as a run or a transfer, whichever is longer."""
BATCHES = (1, 2, 4)
HANDLER_MS = 5
HANDLER = f"""
import time

def preprocess(inputs, state):
    ends = time.perf_counter() + {HANDLER_MS} / 1e3
    while time.perf_counter() < ends:
        pass
    return inputs
"""
CUT_FUNCTIONS = 4
CUT_MEMORY_BYTES = 64 << 20
"""A device holds one of two slices."""
LONGER = 20
"""The simulated time over the live one."""
HEADER = f"{'rate/s':>7}{'requests':>10}" + "".join(
    f"{title:>21}" for title in ("p50 live/sim. ms", "p98 live/sim. ms", "swaps live/sim.", "in SLO live/sim.")
)


class Row(NamedTuple):
    """The figures of the node, or of the simulator."""

    p50_ms: float
    p98_ms: float
    swap_share: float
    """The share of the runs that brought blocks."""
    attainment: float


class Kind(NamedTuple):
    """How the functions use the pool."""

    name: str
    loads: Sequence[float]
    handler: bool = False
    is_cut: bool = False
    """Whether the devices are too small for one function. Then there are fewer functions."""


KINDS = Kind("whole", LOADS), Kind("handler", (0.4,), handler=True), Kind("cut", (0.4,), is_cut=True)


def measure(
    seconds: float,
    seed: int,
    *,
    model: str = MODEL,
    functions: int = FUNCTIONS,
    memory_bytes: int = MEMORY_BYTES,
    small: bool = False,
    kinds: Sequence[Kind] = KINDS,
) -> dict[str, dict[str, float]]:
    """Print the tables; return each live figure over the simulated one, by the kind and the load."""
    family = Family(model, tokens=TOKENS, small=small)
    found = {}
    for kind in kinds:
        count, size = (CUT_FUNCTIONS, CUT_MEMORY_BYTES) if kind.is_cut else (functions, memory_bytes)
        pool = tuple(msgspec.structs.replace(each, kind="null") for each in devices(DEVICES, size))
        with pool_node(scheduling(pool)) as node:
            profile = _profiled(node, family)
            targets = _deployed(node, family, count, kind)
            run_s = profile.run_s(cores=1, concurrency=1)[1]
            most = DEVICES / max(run_s, family.nbytes / LINK_BYTES_PER_S)
            print(f"\n{model}, {kind.name}: {family.nbytes / 1e6:.1f} MB, a run takes {1e3 * run_s:.1f} ms; {count}")
            print(
                f"functions on {DEVICES} null devices of {size / 1e6:.0f} MB, links of {LINK_BYTES_PER_S / 1e9:g} GB/s"
            )
            print(HEADER, flush=True)
            for load in kind.loads:
                rate = load * most / count
                arrivals = poisson([rate] * count, seconds, seed)
                live = _live(send(node, targets, [payload(family)], arrivals), slo_ms(model) / 1e3)
                simulated = _simulated(_scenario(family, profile, pool, rate, count, seconds, seed, kind))
                print(f"{rate * count:7.1f}{len(arrivals):10}", end="")
                pairs = [f"{a:.1f} / {b:.1f}" for a, b in zip(live[:2], simulated[:2], strict=True)]
                pairs += [f"{a:.1%} / {b:.1%}" for a, b in zip(live[2:], simulated[2:], strict=True)]
                print("".join(f"{pair:>21}" for pair in pairs), flush=True)
                found[f"{kind.name} {load}"] = {
                    name: one / max(other, 1e-9) for name, one, other in zip(Row._fields, live, simulated, strict=True)
                }
    return found


def _profiled(node: PoolNode, family: Family) -> Profile:
    """Measure the program in a worker, for all functions that have it."""
    name = f"{family.name}-measured"
    family.deploy(node.client, name, max_batch=max(BATCHES))
    with Client(f"http://127.0.0.1:{node.port}", timeout_s=600.0) as client:
        profile = client.profile(name, options=ProfileOptions(cores=(1,), batches=BATCHES, concurrency=(1,)))
    node.client.remove(name)
    return profile


def _deployed(node: PoolNode, family: Family, functions: int, kind: Kind) -> list[Target]:
    """Deploy the functions. All answer the same, whatever their weights."""
    targets = deployed(node, family, functions, **({"handler": HANDLER} if kind.handler else {}))
    outputs = node.client.infer(f"{family.name}-0000", dict(family.one()))
    digest = hashlib.sha256(b"".join(output.tobytes() for output in outputs.values())).digest()
    return [msgspec.structs.replace(target, digest=digest) for target in targets]


def _live(sent: Sent, slo_s: float) -> Row:
    runs = [run for run in sent.readings.runs if not run.unplaced]
    if count_kinds(sent.outcomes)["answered"] == 0:
        raise RuntimeError(f"no request was answered: {sent.outcomes[0].start}")
    share = sent.readings.swaps / max(1, len(runs))
    return Row(sent.latency_ms(0.5), sent.latency_ms(0.98), share, attainment(sent.outcomes, [slo_s] * FUNCTIONS))


def _scenario(
    family: Family,
    profile: Profile,
    pool: tuple[DeviceConfig, ...],
    rate: float,
    functions: int,
    seconds: float,
    seed: int,
    kind: Kind,
) -> Scenario:
    """Describe the node to the simulator."""
    times = profile.run_s(cores=1, concurrency=1)
    function = FunctionModel(
        name=family.name,
        variants=functions,
        blocks=_blocks(family, profile, pool),
        latency_ms={batch: 1e3 * run_s for batch, run_s in times.items()},
        handler=HandlerModel(before_ms={1: HANDLER_MS}) if kind.handler else None,
        settings=Settings(device="pool", slo_ms=slo_ms(family.name)),
        workload=Poisson(rate),
    )
    return Scenario(seed=seed, duration_s=LONGER * seconds, settle_s=seconds, devices=pool, functions=(function,))


def _blocks(family: Family, profile: Profile, pool: tuple[DeviceConfig, ...]) -> tuple[Blocks, ...]:
    """Describe the blocks. Those of each slice have its part of the profile."""
    manifest = family.packaged("any", device="pool").manifest
    slices = slices_for(manifest, family.program, pool)
    if not slices:
        return tuple(Blocks(mib=block.nbytes / MIB) for block in manifest.blocks)
    works = [each.profile(profile).points[0].latency_s / len(each.sizes) for each in slices]
    return tuple(
        Blocks(mib=nbytes / MIB, work=work)
        for each, work in zip(slices, works, strict=True)
        for nbytes in each.sizes.values()
    )


def _simulated(scenario: Scenario) -> Row:
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        world = World(scenario, Path(root))
        report = world.run()
    latencies = world.reader.latencies([name for model in scenario.functions for name in model.names()])
    p50, p98 = (1e3 * (latencies.quantile(share) or 0.0) for share in (0.5, 0.98))
    return Row(p50, p98, 1 - (report.total.hit_ratio or 0.0), report.total.attainment or 0.0)

"""Throughput over early binding, as the rates of functions fall (Torpor, fig. 8).

One device, and functions without common blocks. As their rates fall, there are more of them, so that the load of the
device stays the same. `native` serves as many functions as fit on the device, and refuses the others; the default
policy brings the missing blocks for each request. Both nodes get the same requests, by turns.
"""

from benchmarks.allocation import run_seconds
from benchmarks.families import Family
from benchmarks.openloop import count_kinds
from benchmarks.pool.calls import LEAST_S, TOKENS, Sent, deployed, payload, poisson, send
from benchmarks.pool.serving import LINK_BYTES_PER_S, devices, pool_node, scheduling
from overwinter.core.policies import Policy
from overwinter.device.partitioned import PARTITION_BYTES

MODEL = "mobilenet-v2"
MEMORY_BYTES = 4 * PARTITION_BYTES
LOAD = 0.5
"""The load of the device, if each request takes as long as a run or a transfer."""
SLACK = 1.06
"""The space that blocks take in partitions, relative to their bytes."""
FACTORS = (1, 2, 4, 8, 16)
FUNCTIONS_MAX = 120
HEADER = f"{'functions':>9}{'rate/min':>10}{'sent/s':>8}{'native/s':>10}{'ours/s':>8}{'over':>7}" + "".join(
    f"{title:>15}" for title in ("native p50/p98", "ours p50/p98", "swaps, MB/s")
)


def measure(
    seconds: float, seed: int, *, model: str = MODEL, memory_bytes: int = MEMORY_BYTES, most: int = FUNCTIONS_MAX
) -> dict[str, float]:
    """Print the table; return the throughput over that of native, by requests per minute and function."""
    family = Family(model, tokens=TOKENS)
    run_s = run_seconds(family)
    total = LOAD / max(run_s, family.nbytes / LINK_BYTES_PER_S, LEAST_S)
    fit = int(memory_bytes / family.nbytes / SLACK)
    pool = devices(1, memory_bytes)
    print(f"\n{model}: {family.nbytes / 1e6:.1f} MB, a run takes {1e3 * run_s:.1f} ms; the device has ", end="")
    print(f"{memory_bytes / 1e6:.0f} MB, its link {LINK_BYTES_PER_S / 1e9:g} GB/s\n{HEADER}", flush=True)
    found = {}
    with (
        pool_node(scheduling(pool)) as ours,
        pool_node(scheduling(pool, Policy(device_binding="native"))) as native,
    ):
        targets = [deployed(node, family, most) for node in (native, ours)]
        for factor in FACTORS:
            count = min(most, factor * fit)
            rate = total / count
            arrivals = poisson([rate] * count, seconds, seed)
            early, late = (
                send(node, its, [payload(family)], arrivals) for node, its in zip((native, ours), targets, strict=True)
            )
            found[f"{60 * rate:.3g}"] = over = late.answered_per_s / max(early.answered_per_s, 1e-9)
            print(f"{count:9}{60 * rate:10.3g}{len(arrivals) / seconds:8.1f}", end="")
            print(f"{early.answered_per_s:10.1f}{late.answered_per_s:8.1f}{over:7.2f}", end="")
            print(f"{_tail(early)}{_tail(late)}{_moved(late)}", flush=True)
            refused = count_kinds(late.outcomes)["refused"]
            if refused:
                print(
                    f"  ours refused {refused}: {next(each.start for each in late.outcomes if each.kind == 'refused')}"
                )
            if count == most:
                break
    return found


def _tail(sent: Sent) -> str:
    return f"{f'{sent.latency_ms(0.5):.1f}/{sent.latency_ms(0.98):.1f} ms':>15}"


def _moved(sent: Sent) -> str:
    return f"{f'{sent.readings.swaps}, {sent.readings.moved_bytes / 1e6 / sent.seconds:.0f}':>15}"

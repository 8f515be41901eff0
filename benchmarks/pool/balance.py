"""The load of four devices under skewed rates, by policy (Torpor, fig. 9).

All functions fit on the devices together. `native` binds each to one device before its first request, so one device may
have several popular ones. `random` chooses any free device for a function that is resident on no free one.
"""

from random import Random

from benchmarks.families import Family
from benchmarks.pool.calls import TOKENS, deployed, payload, poisson, request_seconds, send
from benchmarks.pool.readings import mean_load, variance
from benchmarks.pool.serving import devices, pool_node, scheduling
from overwinter.core.policies import DeviceBinding, Policy
from overwinter.device.partitioned import PARTITION_BYTES

MODEL = "mobilenet-v2"
DEVICES = 4
FUNCTIONS = 40
STEEPNESS = 2
"""The share of a function among the requests is a random number to this power."""
CORES = 0.5
"""The cores that requests take in all; the devices compute on them."""
SLACK = 1.25
BINDINGS: tuple[DeviceBinding, ...] = ("missing-bytes", "native", "random")


def measure(
    seconds: float, seed: int, *, model: str = MODEL, functions: int = FUNCTIONS, count: int = DEVICES
) -> dict[str, float]:
    """Print the table; return the variance of the load by policy."""
    family = Family(model, tokens=TOKENS)
    random = Random(f"{seed} rates")
    weights = [random.expovariate(1.0) ** STEEPNESS for _ in range(functions)]
    total = CORES / request_seconds(family)
    rates = [total * weight / sum(weights) for weight in weights]
    memory_bytes = -(-int(functions * family.nbytes * SLACK / count) // PARTITION_BYTES) * PARTITION_BYTES
    pool = devices(count, memory_bytes)
    names = [device.name for device in pool]
    print(
        f"\n{functions} functions of {model} on {count} devices, {total:.1f} requests/s, the most popular one ",
        end="",
    )
    print(
        f"{max(rates):.1f}\n{'policy':16}{'busy share of each device':>32}{'variance':>10}{'p50 ms':>9}{'p98 ms':>9}",
        end="",
    )
    print(f"{'swaps':>7}{'MB':>8}", flush=True)
    arrivals = poisson(rates, seconds, seed)
    found = {}
    for binding in BINDINGS:
        with pool_node(scheduling(pool, Policy(device_binding=binding))) as node:
            targets = deployed(node, family, functions)
            # The first requests start executors and bring all functions.
            send(node, targets, [payload(family)], [(number * 0.05, number) for number in range(functions)])
            sent = send(node, targets, [payload(family)], arrivals)
        loads = sent.readings.busy_s(names)
        found[binding] = variance(loads)
        shares = " ".join(f"{load / sent.seconds:6.1%}" for load in loads)
        print(f"{binding:16}{shares:>32}{found[binding]:10.4f}{sent.latency_ms(0.5):9.1f}", end="")
        print(f"{sent.latency_ms(0.98):9.1f}{sent.readings.swaps:7}{sent.readings.moved_bytes / 1e6:8.0f}", flush=True)
        if not mean_load(loads, sent.seconds):
            raise RuntimeError("no device ran")
    return found

"""Swaps of live executors: one alone, two at once over two links and over one switch, and one from the other device.

Each device holds one function, and a transfer takes several times as long as a run, so a swap takes as long as its
transfer. Runs of different executors also share the cores; two links are the control for that.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from msgspec import structs

from benchmarks.families import Family
from benchmarks.pool.calls import TOKENS, deployed, payload, send
from benchmarks.pool.readings import DeviceRun
from benchmarks.pool.serving import devices, pool_node, scheduling

MODEL = "mobilenet-v2"
FUNCTIONS = 4
BYTES_PER_S = 1e8
PEER_BYTES_PER_S = 4e8
EVERY_S = 1.0
"""The time between two swaps, or pairs of swaps."""

Arrivals = list[tuple[float, int]]


def alone(rounds: int, every_s: float) -> Arrivals:
    """Return requests for one function after the other: none is resident on a device when it is called."""
    return [(every_s * number, number % FUNCTIONS) for number in range(rounds)]


def at_once(rounds: int, every_s: float) -> Arrivals:
    """Return requests for two functions at a time."""
    return [(every_s * (number // 2), number % FUNCTIONS) for number in range(2 * rounds)]


def again(rounds: int, every_s: float, burst: int) -> Arrivals:
    """Return a request for a function, and later a burst of requests for it: the first device is then busy with one of
    them, and the other device copies the function from it.
    """

    def of_round(number: int) -> Iterator[tuple[float, int]]:
        at, function = every_s * number, number % FUNCTIONS
        yield (at, function)
        yield from [(at + every_s / 2, function)] * burst

    return [each for number in range(rounds) for each in of_round(number)]


def swaps(family: Family, first: Arrivals, *plans: Arrivals, **links: Any) -> list[list[DeviceRun]]:
    """Return the runs that brought blocks, of each plan, on two devices with these links. The first requests load the
    blocks and start the executors.
    """
    # A power of two that holds one function, with some space lost between blocks, and not two.
    memory_bytes = 1 << int(1.1 * family.nbytes).bit_length()
    pool = tuple(
        structs.replace(each, bytes_per_s=BYTES_PER_S, switch=links.get("switch", ""))
        for each in devices(2, memory_bytes, PEER_BYTES_PER_S if links.get("peers") else None)
    )
    with pool_node(scheduling(pool)) as node:
        targets = deployed(node, family, FUNCTIONS)
        send(node, targets, [payload(family)], first)
        sent = [send(node, targets, [payload(family)], plan) for plan in plans]
    return [[run for run in each.readings.runs if run.moved_bytes] for each in sent]


def measure(rounds: int, *, model: str = MODEL, burst: int = 2, every_s: float = EVERY_S) -> Mapping[str, float]:
    """Print the table; return the time of each kind of swap over that of one alone. `burst`: the requests for one
    function at a time, of which one must find its device busy; a model with short runs needs more.
    """
    family = Family(model, tokens=TOKENS)
    first, pairs = at_once(FUNCTIONS, every_s), at_once(rounds, every_s)
    one, two = swaps(family, first, alone(rounds, every_s), pairs)
    [switched] = swaps(family, first, pairs, switch="a")
    [repeated] = swaps(family, first, again(rounds, every_s, burst), peers=True)
    found = {
        "alone": one,
        "two links": two,
        "one switch": switched,
        "from the peer": [each for each in repeated if each.peer_bytes],
    }
    if not all(found.values()):
        raise RuntimeError(f"a kind of swap did not occur: { {kind: len(runs) for kind, runs in found.items()} }")
    times = {kind: median(each.ended - each.began for each in runs) for kind, runs in found.items()}
    print(f"\n{model}, {family.nbytes / 1e6:.1f} MB, over links of {BYTES_PER_S / 1e9:g} GB/s, ", end="")
    print(f"from the peer {PEER_BYTES_PER_S / 1e9:g} GB/s\n{'swap':16}{'runs':>8}{'p50 ms':>10}{'over alone':>12}")
    for kind, seconds in times.items():
        print(f"{kind:16}{len(found[kind]):8}{1e3 * seconds:10.1f}{seconds / times['alone']:12.2f}", flush=True)
    return {kind: round(seconds / times["alone"], 3) for kind, seconds in times.items()}

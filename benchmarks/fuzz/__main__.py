"""Does a node stand whatever is done to it? It is attacked in every way that we know, and a neighbour watches.

`python -m benchmarks.fuzz [--minutes M] [--seed S]`: a real node with a well-behaved neighbour, whose requests are
answered bit for bit as they must be, while others attack it, each kind for its share of the time: requests, uploads,
manifests and pipelines, mutants of encoded programs, crafted programs, forged messages of workers, random calls while
processes are killed, and ways out of a worker. A crash is the end of the daemon, of a zygote or of a worker without a
handler by a signal that nobody sent. A stall is the longest time that the node did not answer whether it lives; beside
it stand the longest time that a function's answer took, and the control: what an idle process that only echoes was kept
waiting by the same machine. A node that ends is started again, and the attacks go on.

A try is done again by `--only KIND --first NUMBER --tries 1` with the same seed.
"""

import argparse

import torch

from benchmarks.fuzz.calls import Calls
from benchmarks.fuzz.crafted import Crafted
from benchmarks.fuzz.forged import Forged
from benchmarks.fuzz.kind import Attacker, Kind
from benchmarks.fuzz.manifests import Manifests
from benchmarks.fuzz.outside import Outside
from benchmarks.fuzz.programs import Programs
from benchmarks.fuzz.report import hear, report
from benchmarks.fuzz.requests import Requests
from benchmarks.fuzz.uploads import Uploads
from benchmarks.hostile.arena import Arena, Neighbour, arena
from benchmarks.hostile.canaries import Machine, Victim
from benchmarks.hostile.functions import Functions, infer_request, right
from benchmarks.hostile.verdicts import Tally

NEIGHBOUR = "neighbour"
FACTOR = 2.0
KINDS = ("requests", "uploads", "manifests", "programs", "crafted", "forged", "calls", "outside")
START_S = 10.0
"""The time that a worker may take to start."""


def kinds_of(found: Arena, functions: Functions, victim: Victim, machine: Machine) -> dict[str, Kind]:
    """Return all kinds by name."""
    every: list[Kind] = [
        Requests(found, functions),
        Uploads(found),
        Manifests(found, functions),
        Programs(found, functions),
        Crafted(found),
        Forged(found, functions),
        Calls(found, functions),
        Outside(found, functions, victim, machine),
    ]
    return {kind.name: kind for kind in every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of attacks; default 10")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--only", action="append", choices=KINDS, help="of these kinds alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first try of each kind; default 0")
    parser.add_argument("--tries", type=int, help="of each kind, in place of a share of the time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    functions = Functions()
    tally = Tally()
    with arena(tally, "--start-timeout-s", str(START_S)) as found:
        victim = Victim(functions)
        machine = Machine()
        neighbour = None
        try:
            kinds = kinds_of(found, functions, victim, machine)
            found.on_fresh.append(lambda: functions.deploy(found.node.client, NEIGHBOUR, FACTOR, tenant=NEIGHBOUR))
            found.on_fresh.append(lambda: victim.deploy(found.node))
            found.start()
            asked = infer_request(NEIGHBOUR)
            neighbour = Neighbour(found.node.port_file, asked, right(FACTOR), found.root)
            attacker = Attacker(found, options.seed)
            chosen = options.only or KINDS
            for name in chosen:
                share_s = 60 * options.minutes / len(chosen)
                attacker.fill(kinds[name], share_s, options.first, options.tries)
                print(f"{name}: {tally.tries[name]} tries", flush=True)
        finally:
            if neighbour is not None:
                neighbour.stop()
            machine.close()
    hear(neighbour.told, attacker)
    report(attacker, neighbour.told, options.seed)


if __name__ == "__main__":
    main()

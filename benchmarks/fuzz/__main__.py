"""Fuzzes a real node with nine kinds of attacks while a well-behaved tenant checks its service.

`python -m benchmarks.fuzz [--minutes M] [--seed S]` starts a node with a well-behaved tenant, whose answers are
compared bit for bit, and attacks it. Each kind of attack gets an equal share of the time: requests, uploads, manifests
and pipelines, mutated encoded programs, crafted programs, forged messages of workers (also calls of programs on
devices), random calls while processes are killed, attempts to leave the sandbox, and several clients that change and
call the same functions at the same time. The node is restarted if it ends, and the attacks continue.

A crash is an end of the daemon or of the base zygote that the benchmark did not cause, or an end of a worker without a
handler by a signal that no process sent. A stall is the longest time for which the node did not answer a liveness
request. The benchmark also prints the longest time of an answer of a function, and the control: the longest delay of an
idle echo process on the same machine.

`--only KIND --first NUMBER --tries 1` with the same seed repeats one try.
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
from benchmarks.fuzz.races import Races
from benchmarks.fuzz.report import count_records, report
from benchmarks.fuzz.requests import Requests
from benchmarks.fuzz.uploads import Uploads
from benchmarks.hostile.attacked_node import AttackedNode, Neighbour, attacked_node
from benchmarks.hostile.canaries import OutsideObjects, Victim
from benchmarks.hostile.functions import Functions, infer_request, right
from benchmarks.hostile.verdicts import Tally

NEIGHBOUR = "neighbour"
FACTOR = 2.0
KINDS = ("requests", "uploads", "manifests", "programs", "crafted", "forged", "calls", "outside", "races")
START_S = 10.0
"""The time that a worker may take to start."""


def kinds_of(found: AttackedNode, functions: Functions, victim: Victim, machine: OutsideObjects) -> dict[str, Kind]:
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
        Races(found, functions),
    ]
    return {kind.name: kind for kind in every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of attacks; default 10")
    parser.add_argument("--seed", type=int, default=1, help="seed of the attacks; default 1")
    parser.add_argument("--only", action="append", choices=KINDS, help="run only this kind; repeatable")
    parser.add_argument("--first", type=int, default=0, help="number of the first try of each kind; default 0")
    parser.add_argument("--tries", type=int, help="most tries of each kind; its share of the time limits them too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    functions = Functions()
    tally = Tally()
    settings = ("--start-timeout-s", str(START_S), "--devices", "2", "--device-memory", "8MiB")
    with attacked_node(tally, *settings) as found:
        victim = Victim(functions)
        machine = OutsideObjects()
        neighbour = None
        try:
            kinds = kinds_of(found, functions, victim, machine)
            found.on_empty.append(lambda: functions.deploy(found.node.client, NEIGHBOUR, FACTOR, tenant=NEIGHBOUR))
            found.on_empty.append(lambda: victim.deploy(found.node))
            found.start()
            asked = infer_request(NEIGHBOUR)
            neighbour = Neighbour(found.node.port_file, asked, right(FACTOR), found.root)
            attacker = Attacker(found, options.seed)
            chosen = options.only or KINDS
            for name in chosen:
                share_s = 60 * options.minutes / len(chosen)
                attacker.run_tries(kinds[name], share_s, options.first, options.tries)
                print(f"{name}: {tally.tries[name]} tries", flush=True)
        finally:
            if neighbour is not None:
                neighbour.stop()
            machine.close()
    count_records(neighbour.records, attacker)
    report(attacker, neighbour.records, options.seed)


if __name__ == "__main__":
    main()

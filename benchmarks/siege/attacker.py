"""The attackers' process: it reads the name of an attack per line, and runs it until the next line.

`python -m benchmarks.siege.attacker PORT SEED`. It has a high nice value, and sleeps four times as long as it computes,
so that the machine is left to the node. An empty line ends an attack, the end of the input ends the process.
"""

import contextlib
import os
import select
import sys
import time

import torch

from benchmarks.siege.attacks import ATTACKS, Attackers

NICE = 10
SHARE = 0.2
"""The share of a core that it may use."""
PAUSE_S = 0.05


def attack(attackers: Attackers, name: str) -> None:
    """Run the attack until there is input."""
    steps = ATTACKS[name](attackers)
    stopped = False
    while not stopped:
        began, used = time.monotonic(), time.process_time()
        next(steps)
        rest = (time.process_time() - used) / SHARE - (time.monotonic() - began)
        stopped = bool(select.select([0], [], [], max(PAUSE_S, rest))[0])
    steps.close()
    attackers.clean_up()


def main() -> None:
    port, seed = map(int, sys.argv[1:])
    os.nice(NICE)
    torch.set_num_threads(1)
    attackers = Attackers(port, seed)
    print("ready", flush=True)
    # Read lines from the descriptor itself: select does not see what Python has buffered.
    while line := _line():
        if name := line.strip():
            with contextlib.suppress(StopIteration):
                attack(attackers, name)
            print("over", flush=True)


def _line() -> str:
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return ""
        text += part
    return text.decode()


if __name__ == "__main__":
    main()

"""The process of the attackers: it is told an attack a line, and goes on with it until the next line.

`python -m benchmarks.siege.attacker PORT SEED`. It is niced, and rests four times as long as it has computed, so that
the machine is the node's; an empty line ends an attack, the end of the input ends it all.
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


def attack(others: Attackers, name: str) -> None:
    """Run the attack until there is input."""
    steps = ATTACKS[name](others)
    stopped = False
    while not stopped:
        began, used = time.monotonic(), time.process_time()
        next(steps)
        rest = (time.process_time() - used) / SHARE - (time.monotonic() - began)
        stopped = bool(select.select([0], [], [], max(PAUSE_S, rest))[0])
    steps.close()
    others.leave()


def main() -> None:
    port, seed = map(int, sys.argv[1:])
    os.nice(NICE)
    torch.set_num_threads(1)
    others = Attackers(port, seed)
    print("ready", flush=True)
    # Read lines from the descriptor itself: select does not see what Python has buffered.
    while line := _line():
        if name := line.strip():
            with contextlib.suppress(StopIteration):
                attack(others, name)
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

"""Kind 6: handlers that send forged messages to the node. Only their own worker and requests may be affected."""

import json
import os
from random import Random

from benchmarks.fuzz.kind import judged
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import exchange
from benchmarks.hostile.functions import Functions, infer_request, order, right, source

WAYS = (
    *("messages", "noise", "long", "deep", "flood", "plus", "descriptors", "truncated buffers", "buffers that change"),
    *("large buffers", "sealed buffers", "closed", "blocking", "answers of another", "log", "quits", "signals"),
    *("stops listening", "calls", "calls later"),
)
PAIRS = (("forger", "honest", "cpu"), ("pooled", "honest-pooled", "pool"))
DESCRIPTORS_MAX = 40
"""The most descriptors that the daemon may have beyond those before the first try."""


class Forged:
    """Functions that forge messages, and honest ones of the same tenant: one of each in workers and on the pool."""

    name = "forged"
    cases = WAYS

    def __init__(self, attacked: AttackedNode, functions: Functions) -> None:
        self._attacked = attacked
        self._functions = functions
        self._descriptors = 0

    def prepare(self) -> None:
        client = self._attacked.node.client
        forger = source("forger")
        for forging, honest, device in PAIRS:
            settings = {"timeout_s": 1.5, "memory_mib": 512, "device": device}
            self._functions.deploy(client, forging, handler=forger, tenant="forgers", **settings)
            self._functions.deploy(client, honest, 11.0, tenant="forgers", device=device)
        self._descriptors = self._open_descriptors()

    def run(self, case: str, rng: Random) -> None:
        port = self._attacked.port
        forging, honest, _ = rng.choice(PAIRS)
        for _ in range(3):
            judged(self._attacked, order(port, forging, json.dumps({"way": case, "seed": rng.randrange(1 << 30)})))
        reply = judged(self._attacked, exchange(port, infer_request(honest)))
        if reply is not None and reply.status == 200 and reply.tensors != right(11.0):
            self._attacked.tally.add("wrong", f"the function beside it answers {reply.tensors.hex()}")
        kept = self._open_descriptors()
        if kept > self._descriptors + DESCRIPTORS_MAX:
            self._attacked.tally.add("outside_writes", f"the daemon keeps {kept - self._descriptors} more descriptors")
            self._descriptors = kept

    def _open_descriptors(self) -> int:
        process = self._attacked.node.process
        return 0 if process is None else len(os.listdir(f"/proc/{process.pid}/fd"))

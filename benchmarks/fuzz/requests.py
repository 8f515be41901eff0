"""Kind 1: random inference requests. A successful answer must be right."""

import json
import time
from random import Random

import torch

from benchmarks.families import as_tensors
from benchmarks.fuzz.kind import judged
from benchmarks.hostile import connections
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.bodies import HEAVY, LIGHT, HostileRequest
from benchmarks.hostile.exchange import HungError, Reply, ask, connect, exchange, receive
from benchmarks.hostile.functions import COLUMNS, Functions, source

HEAVY_PATIENCE_S = 60.0
SENDING_S = 10.0
LIGHT_TRIES = 20
"""The small requests of one try."""
HALF_OPEN_CONNECTIONS = 2000
STALLED_BODIES = 8
STALLED_BYTES = 32 << 20


class Requests:
    """Requests to two functions: one of numbers, one of BYTES."""

    name = "requests"
    cases = (*LIGHT, *connections.SENT, "hangs up", "half open", "stalled bodies", *HEAVY)

    def __init__(self, attacked: AttackedNode, functions: Functions) -> None:
        self._attacked = attacked
        self._functions = functions

    def prepare(self) -> None:
        client = self._attacked.node.client
        self._functions.deploy(client, "scale", 3.0, tenant="requests")
        self._functions.deploy(client, "words", handler=source("words"), tenant="requests")

    def run(self, case: str, rng: Random) -> None:
        if case in LIGHT:
            for _ in range(LIGHT_TRIES):
                self._send_and_check(LIGHT[case](rng))
        elif case in HEAVY:
            judged(self._attacked, exchange(self._attacked.port, HEAVY[case](), HEAVY_PATIENCE_S))
        elif case in connections.SENT:
            self._send(connections.SENT[case](rng))
        elif case == "half open":
            with connections.half_open(self._attacked.port, HALF_OPEN_CONNECTIONS) as count:
                self._attacked.tally.note(f"{count} connections taken")
                self._send_and_check(LIGHT["json"](rng))
        elif case == "stalled bodies":
            self._stall(rng)
        else:
            self._hang_up(rng)

    def _send_and_check(self, sent: HostileRequest) -> None:
        reply = judged(self._attacked, exchange(self._attacked.port, sent.content))
        if reply is not None and reply.status == 200 and sent.values is not None:
            self._check(sent.values, reply)

    def _check(self, values: list[float], reply: Reply) -> None:
        x = torch.tensor([values], dtype=torch.float64).to(torch.float32)
        wanted = x * torch.full((COLUMNS,), 3.0) + torch.ones(COLUMNS)
        if "inference-header-content-length" in reply.headers:
            right = reply.tensors == bytes(as_tensors({"y": wanted})[0].data)
        else:
            given = json.loads(reply.body)["outputs"]
            right = not given or given[0]["data"] == wanted.flatten().tolist()
        if not right:
            self._attacked.tally.add("wrong", f"{values} became {reply.body[:200]!r}")

    def _send(self, parts: connections.Parts) -> None:
        """Send as long as the node accepts it, and read the answer; an invalid request may remain unanswered."""
        until = time.monotonic() + SENDING_S
        with connect(self._attacked.port, SENDING_S) as end:
            try:
                for part in parts:
                    end.sendall(part)
                    if time.monotonic() > until:
                        break
            except OSError:
                pass
            try:
                judged(self._attacked, receive(end, 0.3))
            except HungError:
                self._attacked.answers()

    def _stall(self, rng: Random) -> None:
        """Send half of several bodies, and pause."""
        held = [connect(self._attacked.port) for _ in range(STALLED_BODIES)]
        try:
            for end in held:
                end.settimeout(SENDING_S)
                end.sendall(connections.stalled(STALLED_BYTES, 2 * STALLED_BYTES))
            self._send_and_check(LIGHT["json"](rng))
        finally:
            for end in held:
                end.close()

    def _hang_up(self, rng: Random) -> None:
        """Send requests and disconnect before the answer."""
        for _ in range(50):
            with connect(self._attacked.port) as end:
                end.sendall(LIGHT["json"](rng).content)
        judged(self._attacked, ask(self._attacked.port, "GET", "/v2/models/scale"))

"""Kind 9: several clients of one tenant change and call the same few functions and pipelines at the same time.

They deploy, remove, promote, split, load, unload and call them, and some leave before the answer. Every answer of a
function must be that of a version deployed during the try. At the end all is removed, and nothing may be found.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch

from benchmarks.fuzz.kind import judged
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import Reply, ask, connect, exchange, request, tenant_header
from benchmarks.hostile.functions import COLUMNS, SIZE, Functions, infer_request, register, right, upload_blobs

TENANT = "races"
NAMES = ("races-0", "races-1")
PIPELINE = "races-pipeline"
CLIENTS = 5
STEPS = 10
"""The steps of each client in one try."""
TIMEOUT_S = 5.0
PATIENCE_S = 60.0
LARGE_WEIGHTS = 12
LARGE_SIZE = 1 << 18
"""Such weights have 12 MiB together: a program with them is cut over devices of 8 MiB (`__main__`)."""
HANDLER = "def preprocess(inputs, state):\n    return dict(inputs)\n"
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"isolation": "function"}, {"device": "pool"}, {"device": "any"})
ACTIONS = {
    "deploy": 5,
    "remove": 3,
    "promote": 3,
    "load": 1,
    "unload": 1,
    "infer": 8,
    "pipeline": 2,
    "read": 2,
    "leave": 3,
}
"""The actions of a step, and how often each is chosen."""


class Layers(torch.nn.Module):
    """y = x * factor + 1, as `Scale`, with large weights that add up to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((SIZE,), 2.0), requires_grad=False)
        steps = [float(number // 2 + 1) * (-1) ** number for number in range(LARGE_WEIGHTS - 2)] + [3.0, -2.0]
        self.large = torch.nn.ParameterList([torch.full((LARGE_SIZE,), step) for step in steps]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * self.factor[:COLUMNS]
        for weight in self.large:
            y = y + weight[:COLUMNS]
        return {"y": y}


class Races:
    """A tenant whose clients use the same names at the same time."""

    name = "races"
    cases = ("small", "large", "both")

    def __init__(self, attacked: AttackedNode, functions: Functions) -> None:
        self._attacked = attacked
        self._functions = {"small": functions, "large": Functions(Layers())}

    def prepare(self) -> None:
        """Nothing: each try deploys what it uses."""

    def run(self, case: str, rng: Random) -> None:
        deployed = {float(rng.randint(2, 99)) for _ in range(4)}
        sizes = ["small", "large"] if case == "both" else [case]
        chosen = [self._functions[size] for size in sizes]
        clients = [Client(self._attacked.port, chosen, sorted(deployed), Random(rng.random())) for _ in range(CLIENTS)]
        try:
            with ThreadPoolExecutor(CLIENTS) as threads:
                for running in [threads.submit(client.run) for client in clients]:
                    running.result()
            for client in clients:
                for reply in client.replies:
                    judged(self._attacked, reply)
                for reply in client.answers:
                    self._check_answer(reply, deployed)
        finally:
            self._remove_all()

    def _check_answer(self, reply: Reply | None, deployed: set[float]) -> None:
        if reply is not None and reply.status == 200 and reply.tensors not in {right(factor) for factor in deployed}:
            self._attacked.tally.add("wrong", f"no version of factor {sorted(deployed)} answers so: {reply.said}")

    def _remove_all(self) -> None:
        """Remove all, and count what is still found as wrong."""
        port = self._attacked.port
        for name in (PIPELINE, *NAMES):
            path = f"/overwinter/v1/functions/{name}"
            removed = judged(self._attacked, ask(port, "DELETE", path, patience_s=PATIENCE_S, tenant=TENANT))
            if removed is not None and removed.status not in (200, 404):
                self._attacked.tally.add("wrong", f"removing {name}: {removed.status} {removed.said}")
            found = judged(self._attacked, ask(port, "GET", path, tenant=TENANT))
            if found is not None and found.status != 404:
                self._attacked.tally.add("wrong", f"{name} is found after its removal: {found.status} {found.said}")


class Client:
    """One client, in a thread of its own. It collects the answers."""

    def __init__(self, port: int, functions: list[Functions], factors: list[float], rng: Random) -> None:
        self._port = port
        self._functions = functions
        self._factors = factors
        self._rng = rng
        self.replies: list[Reply | None] = []
        self.answers: list[Reply | None] = []
        """The answers of functions, without those of pipelines."""

    def run(self) -> None:
        """Take all steps."""
        for action in self._rng.choices(list(ACTIONS), list(ACTIONS.values()), k=STEPS):
            step: Callable[[str], None] = getattr(self, f"_{action}")
            step(self._rng.choice(NAMES))

    def _ask(self, method: str, path: str, body: object = None) -> Reply | None:
        content = b"" if body is None else json.dumps(body).encode()
        self.replies.append(ask(self._port, method, path, content, PATIENCE_S, TENANT))
        return self.replies[-1]

    def _version(self, name: str) -> int:
        """Return a version that the name has, or may have had."""
        reply = self._ask("GET", f"/overwinter/v1/functions/{name}")
        newest = 1 if reply is None or reply.status != 200 else json.loads(reply.body)["version"]
        return self._rng.randint(max(1, newest - 2), newest)

    def _deploy(self, name: str) -> None:
        functions, settings = self._rng.choice(self._functions), self._rng.choice(SETTINGS)
        made = functions.package(
            name,
            self._rng.choice(self._factors),
            handler=self._rng.choice((None, HANDLER)),
            tenant=TENANT,
            keep_alive_s=self._rng.choice((0.0, 60.0)),
            timeout_s=TIMEOUT_S,
            **settings,
        )
        upload_blobs(self._port, made)
        self.replies.append(register(self._port, made, PATIENCE_S))

    def _remove(self, name: str) -> None:
        path = f"/overwinter/v1/functions/{self._rng.choice((name, name, PIPELINE))}"
        self._ask("DELETE", path + (f"/versions/{self._version(name)}" if self._rng.random() < 0.4 else ""))

    def _promote(self, name: str) -> None:
        first, second = self._version(name), self._version(name)
        percent = self._rng.choice((0, 30, 100))
        shares = [{"version": first, "percent": percent}, {"version": second, "percent": 100 - percent}]
        chosen = [] if self._rng.random() < 0.3 else [share for share in shares if share["percent"]]
        self._ask("PUT", f"/overwinter/v1/functions/{name}/traffic", {"shares": chosen})

    def _load(self, name: str) -> None:
        self._ask("POST", f"/v2/repository/models/{name}/load")

    def _unload(self, name: str) -> None:
        self._ask("POST", f"/v2/repository/models/{name}/unload")

    def _infer(self, name: str) -> None:
        self.answers.append(exchange(self._port, infer_request(name), PATIENCE_S))
        self.replies.append(self.answers[-1])

    def _pipeline(self, name: str) -> None:
        """Deploy a pipeline of several stages, or call it."""
        if self._rng.random() < 0.5:
            self.replies.append(exchange(self._port, infer_request(PIPELINE), PATIENCE_S))
            return
        count = self._rng.choice((1, 3, 20))
        stages = {
            f"s{number}": {
                "function": self._rng.choice(NAMES),
                "inputs": {"x": f"s{number - 1}:y" if number else "input:x"},
            }
            for number in range(count)
        }
        outputs = {"y": f"s{count - 1}:y"}
        timeout_s = self._rng.choice((0.05, TIMEOUT_S))
        pipeline = {"name": PIPELINE, "inputs": ["x"], "stages": stages, "outputs": outputs, "timeout_s": timeout_s}
        self._ask("POST", "/overwinter/v1/pipelines", pipeline)

    def _read(self, name: str) -> None:
        path = self._rng.choice(("usage", "functions", "pipelines", f"functions/{name}"))
        self._ask("GET", f"/overwinter/v1/{path}")

    def _leave(self, name: str) -> None:
        """Send a request, and close the connection before its answer."""
        name = self._rng.choice((name, PIPELINE))
        header = tenant_header(TENANT)
        sent = self._rng.choice(
            (
                infer_request(name),
                request("DELETE", f"/overwinter/v1/functions/{name}", headers=header),
                request("POST", f"/v2/repository/models/{name}/load", headers=header),
            )
        )
        with connect(self._port) as end:
            end.sendall(sent[: self._rng.choice((len(sent), len(sent) // 2))])
            time.sleep(self._rng.choice((0.0, 0.01, 0.1)))

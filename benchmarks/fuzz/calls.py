"""Kind 7: several tenants deploy, remove, load, call and measure at random while processes are killed and stopped.

A model tracks what is deployed. Deployed functions must answer correctly or with an explained error; removed ones must
not be found.
"""

import os
import signal
import time
from contextlib import suppress
from random import Random

import msgspec

from benchmarks.fuzz.kind import judged
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import Reply, ask, exchange
from benchmarks.hostile.functions import Functions, infer_request, register, right, upload_blobs
from overwinter.core.profiling import ProfileOptions

TENANTS = 3
NAMES = 3
"""The names of each tenant."""
STEPS = 12
"""The steps of one try."""
STOPPED_S = 0.3
TIMEOUT_S = 5.0
"""The timeout of every function: by then a request is answered or refused."""
PATIENCE_S = 30.0
"""Longer than a worker may take to start (`START_S` of `__main__`) plus a request."""
REFUSED = (409, 429, 500, 503, 504, 507)
"""The refusals that are allowed for a deployed function while processes die; their reasons are judged separately."""
HANDLER = "def preprocess(inputs, state):\n    return dict(inputs)\n"


class Calls:
    """The model: the factor of each version of each function, and what was unloaded."""

    name = "calls"
    cases = ("calm", "workers killed", "workers stopped", "zygotes killed", "zygotes stopped", "daemon killed")

    def __init__(self, attacked: AttackedNode, functions: Functions) -> None:
        self._attacked = attacked
        self._functions = functions
        self._versions: dict[str, dict[int, float]] = {}
        self._unloaded: set[str] = set()
        self._uncertain: set[str] = set()
        """The functions of interrupted calls: any answer for them is right."""
        self._stopped: list[int] = []
        self._starts = 0

    def prepare(self) -> None:
        """Begin the model with an empty node."""
        for name in list(self._versions):
            judged(
                self._attacked,
                ask(self._attacked.port, "DELETE", f"/overwinter/v1/functions/{name}", tenant=name.partition("-")[0]),
            )
        self._versions, self._unloaded, self._uncertain = {}, set(), set()

    def run(self, case: str, rng: Random) -> None:
        self._attacked.expects_death = case != "calm"
        for step in range(STEPS):
            if case != "calm" and step % 4 == 2:
                self._kill_or_stop(case, rng)
            self._note_restarts()
            tenant = f"t{rng.randrange(TENANTS)}"
            name = f"{tenant}-{rng.randrange(NAMES)}"
            action = rng.choice(("deploy", "infer", "infer", "infer", "infer", "remove", "load", "unload", "profile"))
            try:
                getattr(self, f"_{action}")(tenant, name, rng)
            except OSError:
                # The daemon was killed during this call.
                self._uncertain.add(name)
                self._attacked.examine()
        self._continue_stopped()

    def _note_restarts(self) -> None:
        """Note restarts of the node: it loads all functions, unloaded ones too."""
        if self._starts != len(self._attacked.restarts):
            self._starts = len(self._attacked.restarts)
            self._unloaded.clear()

    def _kill_or_stop(self, case: str, rng: Random) -> None:
        self._continue_stopped()
        node = self._attacked.node
        workers = node.worker_pids()
        zygotes = [pid for pid in node.pids()[1:] if pid not in workers]
        if case == "daemon killed":
            self._attacked.kill()
            self._attacked.restart()
            return
        chosen = rng.choice((workers if case.startswith("workers") else zygotes) or [0])
        if chosen:
            with suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL if case.endswith("killed") else signal.SIGSTOP)
        if case.endswith("stopped"):
            self._stopped.append(chosen)
            time.sleep(STOPPED_S)

    def _continue_stopped(self) -> None:
        """Continue the stopped processes that still exist."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                if pid in self._attacked.node.pids():
                    os.kill(pid, signal.SIGCONT)
        self._stopped = []

    def _deploy(self, tenant: str, name: str, rng: Random) -> None:
        factor = float(rng.randint(2, 99))
        handler = rng.choice((None, HANDLER))
        made = self._functions.package(
            name, factor, handler=handler, tenant=tenant, keep_alive_s=rng.choice((0.0, 0.2, 60.0)), timeout_s=TIMEOUT_S
        )
        upload_blobs(self._attacked.port, made)
        reply = judged(self._attacked, register(self._attacked.port, made, PATIENCE_S))
        if reply is not None and reply.status == 201:
            version = msgspec.json.decode(reply.body)["version"]
            self._versions.setdefault(name, {})[version] = factor
            self._unloaded.discard(name)
        elif reply is None:
            self._uncertain.add(name)
        elif reply.status not in REFUSED:
            self._wrong(f"deploying {name}", reply)

    def _infer(self, tenant: str, name: str, rng: Random) -> None:
        values = [float(rng.randint(-99, 99)) for _ in range(4)]
        reply = judged(self._attacked, exchange(self._attacked.port, infer_request(name, values), PATIENCE_S))
        there = self._versions.get(name)
        if reply is None or name in self._uncertain:
            return
        if not there:
            if reply.status != 404:
                self._wrong(f"{name} is not deployed", reply)
            return
        if reply.status == 200:
            if reply.tensors != right(there[max(there)], values) or name in self._unloaded:
                unloaded = ", unloaded" if name in self._unloaded else ""
                self._wrong(f"{name} of factor {there[max(there)]}{unloaded}, {values}", reply)
        elif reply.status not in REFUSED or reply.status == 409:
            self._wrong(f"{name} is deployed", reply)

    def _remove(self, tenant: str, name: str, rng: Random) -> None:
        there = self._versions.get(name, {})
        version = rng.choice(sorted(there)) if there and rng.random() < 0.5 else None
        path = f"/overwinter/v1/functions/{name}" + (f"/versions/{version}" if version else "")
        reply = judged(self._attacked, ask(self._attacked.port, "DELETE", path, patience_s=PATIENCE_S, tenant=tenant))
        if reply is None:
            self._uncertain.add(name)
        elif reply.status == 200:
            if version is None:
                self._versions.pop(name, None)
                self._unloaded.discard(name)
                self._uncertain.discard(name)
            else:
                there.pop(version)
        elif reply.status != 404 or (there and name not in self._uncertain):
            self._wrong(f"removing {path}", reply)

    def _load(self, tenant: str, name: str, rng: Random) -> None:
        reply = judged(
            self._attacked,
            ask(self._attacked.port, "POST", f"/v2/repository/models/{name}/load", b"", PATIENCE_S, tenant),
        )
        if reply is not None and reply.status == 200:
            self._unloaded.discard(name)
        self._check_found(name, reply)
        if reply is None or reply.status in REFUSED:
            # It may be callable although its worker died before it was ready.
            self._uncertain.add(name)

    def _unload(self, tenant: str, name: str, rng: Random) -> None:
        reply = judged(
            self._attacked, ask(self._attacked.port, "POST", f"/v2/repository/models/{name}/unload", tenant=tenant)
        )
        if reply is not None and reply.status == 200:
            self._unloaded.add(name)
        self._check_found(name, reply)

    def _profile(self, tenant: str, name: str, rng: Random) -> None:
        body = msgspec.json.encode(ProfileOptions(cores=(1,), batches=(1,), concurrency=(1,), layers=False))
        path = f"/overwinter/v1/functions/{name}/profile"
        self._check_found(
            name, judged(self._attacked, ask(self._attacked.port, "POST", path, body, PATIENCE_S, tenant))
        )

    def _check_found(self, name: str, reply: Reply | None) -> None:
        """Count a reply that contradicts the model: a deployed function is found, and any other is not."""
        there = bool(self._versions.get(name))
        if reply is None or name in self._uncertain:
            return
        if (reply.status == 404) == there or (there and reply.status not in (200, *REFUSED)):
            self._wrong(f"{name} is {'' if there else 'not '}deployed", reply)

    def _wrong(self, about: str, reply: Reply) -> None:
        self._attacked.tally.add("wrong", f"{about}: {reply.status} {reply.said}")

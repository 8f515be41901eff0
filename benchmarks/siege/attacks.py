"""The attacks on a node that serves another tenant. Each is a generator of steps with pauses.

When an attack ends, the attacker's `clean_up` removes what it has deployed. A step is little work for the attacker, but
much work or a long wait for the node.
"""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from random import Random

from benchmarks.fuzz.crafted import NAME as CRAFTED
from benchmarks.fuzz.crafted import REACHING
from benchmarks.fuzz.manifests import NUMERIC
from benchmarks.fuzz.uploads import begun
from benchmarks.hostile import connections
from benchmarks.hostile.bodies import HEAVY
from benchmarks.hostile.exchange import HungError, Reply, ask, connect, exchange, receive, request, tenant_header
from benchmarks.hostile.functions import Functions, infer_request, order_request, register, source, upload_blobs
from benchmarks.hostile.mutation import LARGE
from overwinter.api.deployer import Package, package, settings_of
from overwinter.core.tensor import TensorSpec
from overwinter.model.program import Call, Layer, Program, Slot, Value
from overwinter.store.blocks import address_of
from overwinter.store.manifest import encode_manifest

STEP_S = 3.0
"""The longest wait for an answer in one step."""
TENANTS = 4
CALLS = 12
"""The requests to each function by `settings`, `_hogs` and `removed_while_running`; they do not wait for answers."""
DAY_S = 86_400.0
TRIALS = 32
SLOW_CALLS = 200
SLOW_ROWS = 1 << 20
HANGING = "import time\ntime.sleep(100_000)\n"
SPINNING = "def preprocess(inputs, state):\n    while True:\n        pass\n"
Steps = Iterator[None]


class Attackers:
    """Other tenants, other clients, and what they have deployed."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.rng = Random(seed)
        self.functions = Functions()
        self._deployed: dict[str, str] = {}
        """The tenant of each deployed function, by name."""
        self._ends: list[socket.socket] = []

    def deploy(self, made: Package) -> bool:
        """Deploy if the node accepts it; return whether it did."""
        name = made.manifest.name
        self._deployed[name] = made.manifest.tenant
        with suppress(OSError, HungError):
            upload_blobs(self.port, made)
            reply = register(self.port, made, STEP_S)
            return reply is not None and reply.status == 201
        return False

    def ask(self, content: bytes) -> Reply | None:
        """Send one request and wait for the answer."""
        with suppress(OSError, HungError):
            return exchange(self.port, content, STEP_S)
        return None

    def call(self, content: bytes) -> None:
        """Send one request without waiting for the answer, and keep the connection open."""
        with suppress(OSError):
            end = connect(self.port, STEP_S)
            self._ends.append(end)
            end.sendall(content)

    def begin(self, made: Package) -> None:
        """Begin a deploy without waiting for its end."""
        name, tenant = made.manifest.name, made.manifest.tenant
        self._deployed[name] = tenant
        with suppress(OSError, HungError):
            upload_blobs(self.port, made)
        self.call(request("POST", "/overwinter/v1/functions", encode_manifest(made.manifest), tenant_header(tenant)))

    def remove(self, name: str) -> None:
        """Remove a function."""
        with suppress(OSError, HungError):
            ask(self.port, "DELETE", f"/overwinter/v1/functions/{name}", patience_s=STEP_S, tenant=self._deployed[name])

    def clean_up(self) -> None:
        """Close all connections, and remove everything."""
        for end in self._ends:
            end.close()
        for name in self._deployed:
            self.remove(name)
        self._ends, self._deployed = [], {}

    def hog(self, number: int, **settings: float) -> str:
        """Deploy a function that uses as many resources as it can; return its name."""
        name = f"hog-{number}"
        self.deploy(self.functions.package(name, handler=source("hog"), tenant=f"siege-{number % TENANTS}", **settings))
        return name


def settings(attackers: Attackers) -> Steps:
    """Deploy with settings at their limits, then profile and call the function, so that they take effect."""
    while True:
        for name in NUMERIC:
            for value in (5e-324, 1, *LARGE):
                manifest = attackers.functions.package("extreme", tenant="siege-0")
                with suppress(Exception):
                    # The client refuses some of these settings; the fuzz benchmark sends them in another way.
                    manifest = attackers.functions.package("extreme", tenant="siege-0", **{name: value})
                if attackers.deploy(manifest):
                    path = "/overwinter/v1/functions/extreme/profile"
                    with suppress(OSError, HungError):
                        ask(
                            attackers.port,
                            "POST",
                            path,
                            b'{"cores":[1],"batches":[1],"layers":false}',
                            STEP_S,
                            "siege-0",
                        )
                    for _ in range(CALLS):
                        attackers.call(infer_request("extreme"))
                attackers.clean_up()
                yield


def heavy_requests(attackers: Attackers) -> Steps:
    """Send requests that are expensive to check."""
    attackers.deploy(attackers.functions.package("scale", tenant="siege-0"))
    attackers.deploy(attackers.functions.package("words", handler=source("words"), tenant="siege-0"))
    made = {name: make() for name, make in HEAVY.items() if "300" not in name}
    while True:
        for content in made.values():
            attackers.ask(content)
            yield


def odd_connections(attackers: Attackers) -> Steps:
    """Send hostile bytes on connections: long headers, tiny chunks, false lengths and others."""
    while True:
        for make in connections.SENT.values():
            with suppress(OSError, HungError), connect(attackers.port, STEP_S) as end:
                for part, _ in zip(make(attackers.rng), range(64), strict=False):
                    end.sendall(part)
                receive(end, 0.2)
            yield


def half_open(attackers: Attackers) -> Steps:
    """Open connections that never finish, and send bodies that stop in the middle."""
    with ExitStack() as held:
        held.enter_context(connections.half_open(attackers.port, 2000))
        for _ in range(8):
            with suppress(OSError):
                end = held.enter_context(connect(attackers.port, STEP_S))
                end.sendall(connections.stalled(32 << 20, 64 << 20))
            yield
        while True:
            yield


def dripping(attackers: Attackers) -> Steps:
    """Upload more blocks than the node has threads for the disk, one byte at a time."""
    with ExitStack() as held:
        ends = []
        for _ in range(24):
            with suppress(OSError):
                ends.append(held.enter_context(connect(attackers.port, STEP_S)))
                ends[-1].sendall(begun(address_of(attackers.rng.randbytes(32)), 1 << 20, b"."))
        while True:
            for end in ends:
                with suppress(OSError):
                    end.sendall(b".")
            yield


def _hogs(way: str, seconds: float, **settings: float) -> Callable[[Attackers], Steps]:
    def attack(attackers: Attackers) -> Steps:
        names = [attackers.hog(number, timeout_s=DAY_S, **settings) for number in range(TENANTS)]
        text = json.dumps({"way": way, "seconds": seconds})
        yield
        for _ in range(CALLS):
            for name in names:
                attackers.call(order_request(name, text))
            yield
        while True:
            yield

    attack.__doc__ = f"Call handlers `hog` of {TENANTS} tenants with the way {way!r}."
    return attack


def removed_while_running(attackers: Attackers) -> Steps:
    """Remove functions whose handlers sleep, during runs, and deploy them under other names."""
    number = 0
    while True:
        number += 1
        name = attackers.hog(number, timeout_s=DAY_S, max_workers=8)
        for _ in range(CALLS):
            attackers.call(order_request(name, json.dumps({"way": "sleep", "seconds": DAY_S})))
        yield
        attackers.remove(name)
        yield


def hanging_trials(attackers: Attackers) -> Steps:
    """Deploy handlers that do not end when they are loaded, or when they are tried."""
    number = 0
    while True:
        for handler in (HANGING, SPINNING):
            number += 1
            made = attackers.functions.package(f"stuck-{number}", handler=handler, tenant=f"siege-{number % TENANTS}")
            if number <= TRIALS:
                attackers.begin(made)
            else:
                with suppress(OSError, HungError):
                    upload_blobs(attackers.port, made)
            yield


def slow_warm_ups(attackers: Attackers) -> Steps:
    """Deploy new programs that take seconds for inputs of their example sizes."""
    number = 0
    while True:
        number += 1
        program = slow_program(SLOW_CALLS + number % 50)
        made = package("slow", program, [], tenant="siege-0", settings=settings_of(None, {"timeout_s": 60.0}))
        attackers.deploy(made)
        x = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
        with suppress(OSError, HungError):
            ask(attackers.port, "POST", "/v2/models/slow/infer", x, STEP_S)
        yield


def slow_program(calls: int) -> Program:
    """A program of many cosines in sequence, with a large example input."""
    return Program(
        inputs=(TensorSpec("x", "FP32", ("rows", 4)),),
        outputs=(TensorSpec("y", "FP32", ("rows", 4)),),
        weights=(),
        calls=tuple(Call("aten.cos.default", (Slot(at),), {}, (at + 1,), (at,) if at else ()) for at in range(calls)),
        values=tuple(Value("float32") for _ in range(calls)),
        output_slots=(calls,),
        layers=(Layer("", 0, calls, 0, 0, 0),),
        dimensions={"rows": (1, SLOW_ROWS)},
        example={"rows": SLOW_ROWS},
    )


def forgers(attackers: Attackers) -> Steps:
    """Deploy handlers that flood the node with forged messages."""
    name = "forger"
    attackers.deploy(attackers.functions.package(name, handler=source("forger"), tenant="siege-0", timeout_s=5.0))
    while True:
        for way in ("messages", "long", "flood", "plus", "descriptors", "truncated buffers", "large buffers", "deep"):
            attackers.call(order_request(name, json.dumps({"way": way, "seed": attackers.rng.randrange(1 << 30)})))
            yield


def crashing_programs(attackers: Attackers) -> Steps:
    """Deploy programs that try to end their worker, or to read memory outside of their tensors."""
    while True:
        for make in REACHING.values():
            program, weights = make()
            attackers.deploy(package(CRAFTED, program, [weight.contiguous() for weight in weights], tenant="siege-0"))
            attackers.clean_up()
            yield


def churn(attackers: Attackers) -> Steps:
    """Deploy new functions all the time, call each once and remove it."""
    number = 0
    while True:
        number += 1
        name = f"churn-{number}"
        attackers.deploy(attackers.functions.package(name, float(number), tenant=f"siege-{number % TENANTS}"))
        attackers.ask(infer_request(name))
        attackers.clean_up()
        yield


ATTACKS: dict[str, Callable[[Attackers], Steps]] = {
    "settings": settings,
    "heavy requests": heavy_requests,
    "odd connections": odd_connections,
    "half open": half_open,
    "dripping": dripping,
    "sleepers": _hogs("sleep", DAY_S, max_workers=64),
    "spinners": _hogs("spin", DAY_S, max_workers=4, threads=2),
    "removed": removed_while_running,
    "hanging trials": hanging_trials,
    "slow warm-ups": slow_warm_ups,
    "background": _hogs("burn", DAY_S),
    "contending threads": _hogs("contend", DAY_S),
    "log floods": _hogs("flood", DAY_S),
    "heap": _hogs("heap", 5.0, memory_mib=4096),
    "shared memory": _hogs("shared", 5.0, memory_mib=4096),
    "kernel buffers": _hogs("socket_buffers", 5.0),
    "forks": _hogs("fork", 10.0),
    "forgers": forgers,
    "crashing programs": crashing_programs,
    "churn": churn,
}
"""Every attack by name, in their order."""

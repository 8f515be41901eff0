"""A node in this process for tests of the API: real functions on bytes and a real repository, without workers."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import uvloop
from starlette.types import Receive, Scope, Send

from overwinter.api.access import Access
from overwinter.api.app import create_app, serve
from overwinter.api.audit import Audit
from overwinter.api.budget import Budget, budget_of
from overwinter.api.draining import Drain
from overwinter.core.call import Call, Result
from overwinter.core.config import RequestLimits
from overwinter.core.errors import NotFoundError, OverloadedError
from overwinter.core.function import Settings
from overwinter.core.pipeline import Pipeline
from overwinter.core.tensor import BYTES, Tensor, TensorSpec, pack_bytes, unpack_bytes
from overwinter.core.versions import Shares
from overwinter.node.views import DeployedVersion
from overwinter.store.blocks import address_of
from overwinter.store.manifest import Blob, Manifest
from overwinter.store.repository import Repository
from overwinter.store.tokens import TokenFile

REQUEST_BYTES_MAX = 1 << 20
BLOCK_BYTES_MAX = 1 << 21
LIMITS = RequestLimits(
    request_bytes_max=REQUEST_BYTES_MAX,
    json_bytes_max=REQUEST_BYTES_MAX,
    block_bytes_max=BLOCK_BYTES_MAX,
    requests_bytes_max=64 << 20,
    memory_wait_s=0.2,
)
"""Small, so that tests can reach the limits; a fast client does not come near the time limits."""

Outputs = list[Tensor]


class View(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tenant: str = "default"
    version: int
    traffic: int
    state: str
    reason: str = ""
    platform: str = "overwinter_program"
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: Settings

    def info(self, whole: bool = False, /) -> "View":
        return self


def spec(name: str, datatype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


def add(inputs: dict[str, Tensor]) -> Outputs:
    """Return sum and difference of two INT32 tensors."""
    a, b = (memoryview(bytes(inputs[name].data)).cast("i").tolist() for name in ("a", "b"))
    shape = inputs["a"].shape
    return [
        Tensor("sum", "INT32", shape, struct.pack(f"<{len(a)}i", *(x + y for x, y in zip(a, b, strict=True)))),
        Tensor("difference", "INT32", shape, struct.pack(f"<{len(a)}i", *(x - y for x, y in zip(a, b, strict=True)))),
    ]


def reverse(inputs: dict[str, Tensor]) -> Outputs:
    """Return each BYTES element reversed."""
    given = inputs["text"]
    elements = unpack_bytes(given.data, given.shape[0])
    return [Tensor("reversed", BYTES, given.shape, pack_bytes([element[::-1] for element in elements]))]


def echo(inputs: dict[str, Tensor]) -> Outputs:
    given = inputs["x"]
    return [Tensor("y", given.datatype, given.shape, bytes(given.data))]


def overloaded(inputs: dict[str, Tensor]) -> Outputs:
    raise OverloadedError("function 'busy' has 512 requests waiting: try again later", 2.5)


def broken(inputs: dict[str, Tensor]) -> Outputs:
    raise ZeroDivisionError("a secret of the node")


ECHOED = ("BOOL", "UINT8", "INT8", "INT16", "UINT32", "INT64", "UINT64", "FP16", "BF16", "FP32", "FP64", BYTES)

FUNCTIONS: dict[str, tuple[Callable[[dict[str, Tensor]], Outputs], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
    "add": (
        add,
        (spec("a", "INT32", "batch", 3), spec("b", "INT32", "batch", 3)),
        (spec("sum", "INT32", "batch", 3), spec("difference", "INT32", "batch", 3)),
    ),
    "reverse": (reverse, (spec("text", BYTES, "n"),), (spec("reversed", BYTES, "n"),)),
    "busy": (overloaded, (spec("x", "FP32", "n"),), (spec("y", "FP32", "n"),)),
    "broken": (broken, (spec("x", "FP32", "n"),), (spec("y", "FP32", "n"),)),
    "slow": (echo, (spec("x", "FP32", "n"),), (spec("y", "FP32", "n"),)),
    **{
        f"echo-{name.lower()}": (echo, (spec("x", name, "batch", "n"),), (spec("y", name, "batch", "n"),))
        for name in ECHOED
    },
}


class FakeNode:
    """The node's interface over FUNCTIONS; deployed functions return their input `x` as `y`."""

    def __init__(self, root: Path) -> None:
        self.repository = Repository(root)
        self.views: dict[tuple[str, int], View] = {}
        self.owners: dict[str, str] = {}
        self.calls: list[tuple[str, int | None, float | None, int]] = []
        self.traffic_set: list[tuple[str, Shares]] = []
        self.slow_started = threading.Event()
        self.slow_cancelled = threading.Event()
        self.slow_go = asyncio.Event()
        for name, (_, inputs, outputs) in FUNCTIONS.items():
            self._add(name, 1, inputs, outputs)
        self._add("add", 2, *FUNCTIONS["add"][1:])

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return any(view.state == "READY" for view in self.views.values())

    def functions(self, tenant: str | None = None) -> list[View]:
        return [view for _, view in sorted(self.views.items()) if tenant in (None, view.tenant)]

    def pipelines(self, tenant: str | None = None) -> list[View]:
        return []

    def versions(self, name: str) -> list[int]:
        return sorted(version for known, version in self.views if known == name)

    def owner(self, name: str) -> str:
        self.view(name, None)
        return self.owners.get(name, "default")

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: str) -> View:
        raise NotFoundError(f"{pipeline.name!r}: there are no pipelines here")

    def view(self, name: str, version: int | None) -> View:
        versions = [key[1] for key in self.views if key[0] == name]
        wanted = max(versions, default=0) if version is None else version
        if wanted not in versions:
            raise NotFoundError(f"unknown function {name!r}" + ("" if version is None else f" version {version}"))
        return self.views[name, wanted]

    async def infer(self, call: Call) -> Result:
        name, version = call.name, call.version
        self.calls.append((name, version, call.timeout_s, call.priority))
        if name == "slow":
            self.slow_started.set()
            try:
                await self.slow_go.wait()
            except asyncio.CancelledError:
                self.slow_cancelled.set()
                raise
        compute = FUNCTIONS[name][0] if name in FUNCTIONS else echo
        outputs = compute({tensor.name: tensor for tensor in call.inputs})
        assert call.reserve is not None
        call.reserve(sum(len(tensor.data) for tensor in outputs))
        return Result(name, self.view(name, version).version, outputs, "host")

    async def deploy(self, manifest: Manifest, functions_max: int | None = None) -> DeployedVersion:
        deployment = self.repository.register(manifest, time.time())
        self._add(manifest.name, deployment.version, manifest.inputs, manifest.outputs, manifest.tenant)
        self.owners[manifest.name] = manifest.tenant
        return DeployedVersion(deployment.name, deployment.version, "")

    async def remove(self, name: str, version: int | None) -> None:
        self.view(name, version)
        self.views = {key: view for key, view in self.views.items() if key[0] != name or version not in (None, key[1])}

    async def set_traffic(self, name: str, shares: Shares) -> None:
        for share in shares:
            self.view(name, share.version)
        self.traffic_set.append((name, shares))

    async def load(self, name: str, version: int | None) -> None:
        self._set_state(name, version, "READY", "")

    async def unload(self, name: str, version: int | None) -> None:
        self._set_state(name, version, "UNAVAILABLE", "unloaded")

    def _add(
        self,
        name: str,
        version: int,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        tenant: str = "default",
    ) -> None:
        for key, view in self.views.items():
            if key[0] == name:
                self.views[key] = msgspec.structs.replace(view, traffic=0)
        self.views[name, version] = View(
            name=name,
            tenant=tenant,
            version=version,
            traffic=100,
            state="READY",
            inputs=inputs,
            outputs=outputs,
            settings=Settings(slo_ms=80),
        )

    def _set_state(self, name: str, version: int | None, state: str, reason: str) -> None:
        view = self.view(name, version)
        self.views[name, view.version] = msgspec.structs.replace(view, state=state, reason=reason)


class Served(msgspec.Struct):
    """A node that listens on a socket."""

    node: FakeNode
    budget: Budget
    port: int
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], None]
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(
    root: Path, drain_s: float = 20, limits: RequestLimits = LIMITS, tokens: TokenFile | None = None
) -> Iterator[Served]:
    """Serve a new node from another thread with its own loop. `tokens`: the tokens that it requires, as a node does."""
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    found: list[Served] = []
    errors: list[BaseException] = []

    async def run() -> None:
        node = FakeNode(root)
        budget = budget_of(limits, None)
        access = Access(node, tokens, Audit(root, print))
        drain = Drain(drain_s)
        app = create_app(access, limits, budget, drain)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(serve(app, listener, limits, drain))
            port = listener.getsockname()[1]
            found.append(Served(node, budget, port, loop, lambda: loop.call_soon_threadsafe(task.cancel), thread))
            started.set()
        node.repository.close()

    def main() -> None:
        try:
            uvloop.run(run())
        except BaseException as error:  # noqa: BLE001 - handed to the test below
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    started.wait()
    try:
        yield found[0]
    finally:
        if found and thread.is_alive():
            # Its loop may have ended after the check.
            with suppress(RuntimeError):
                found[0].stop()
        thread.join()
    assert errors == []


def manifest_of(name: str, program: bytes, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Manifest:
    """Return a manifest whose only blob is `program`."""
    blob = Blob(address_of(program), len(program))
    return Manifest(name=name, tenant="default", program=blob, blocks=(), inputs=inputs, outputs=outputs)


class Held:
    """An application that answers `/waits` only after a release, whether or not its client has disconnected."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.begun = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/waits":
            self.begun.release()
            await receive()
            await self.released.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

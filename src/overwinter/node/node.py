"""One machine's node: a mind, its loop and hands, a repository, a host store, and what callers may ask."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO

from overwinter.core.config import NodeConfig
from overwinter.core.errors import (
    AuthorError,
    CallerError,
    ConflictError,
    HandlerError,
    NotFoundError,
    OverwinterError,
)
from overwinter.core.events import Arrived, Cancelled, Deployed, Event, LoadAsked, Removed, UnloadAsked
from overwinter.core.ids import FunctionId, FunctionName, RequestId, Seconds, function_id
from overwinter.core.journal import Journal
from overwinter.core.tensor import Tensor
from overwinter.model.program import decode_program, validate
from overwinter.node import clock
from overwinter.node.effects import NodeEffects, Payload
from overwinter.node.functions import DeployedFunction
from overwinter.node.loop import Loop
from overwinter.node.processes import Processes
from overwinter.node.views import FunctionView, Reply
from overwinter.policy.mind import Mind
from overwinter.store.host import HostStore
from overwinter.store.manifest import Deployment, Manifest
from overwinter.store.repository import Repository

COLLECT_GRACE_S = 600.0
"""Blocks that no function needs stay so long, so that a deploy under way does not lose what it sent."""


class Node:
    """Serves functions. Made by `running`, which starts and stops all that belongs to it."""

    def __init__(self, config: NodeConfig, repository: Repository, host: HostStore, mind: Mind) -> None:
        self.config = config
        self.repository = repository
        self.host = host
        self._mind = mind
        self._last_request = 0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Set by `running`, in the order in which they need each other.
        self._effects: NodeEffects
        self._loop: Loop
        self.processes: Processes
        self.journal: Journal

    # What callers ask

    def live(self) -> bool:
        """Whether the node's loop still works."""
        return not self._broken.done()

    def ready(self) -> bool:
        """Whether bodies can be forked."""
        return self.live() and self.processes.is_up()

    async def broken(self) -> None:
        """Wait until the node cannot go on, and raise why."""
        await asyncio.shield(self._broken)

    async def infer(
        self, name: FunctionName, version: int | None, inputs: list[Tensor], timeout_s: float | None, priority: int
    ) -> Reply:
        """Run a function on inputs that fit its specs; waits for a wake if it sleeps. Raises core errors.

        `timeout_s` bounds the wait, at most to the function's own; `priority` has no effect with FIFO queues.
        """
        self._last_request += 1
        request = RequestId(self._last_request)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._effects.payloads[request] = Payload(inputs, future)
        deadline = None if timeout_s is None else Seconds(clock.now() + timeout_s)
        self._post(Arrived(request, name, version, deadline))
        try:
            return await future
        except asyncio.CancelledError:
            self._effects.payloads.pop(request, None)
            self._post(Cancelled(request))
            raise

    async def deploy(self, manifest: Manifest) -> Deployment:
        """Register a version whose blocks are in the repository, and try it; raises what it failed with.

        It answers for its name from then on. A version that fails leaves only its number behind.
        """
        await asyncio.to_thread(self._check, manifest)
        deployment = await asyncio.to_thread(self.repository.register, manifest, clock.wall(), False)
        function = DeployedFunction(deployment)
        self._effects.functions[function.id] = function
        try:
            await self._ask(function.id, Deployed(function.spec(), on_trial=True))
            await asyncio.to_thread(self.repository.prove, deployment.name, deployment.version)
        except BaseException as error:
            if not self._broken.done():
                self._post(Removed(function.id))
            await asyncio.shield(asyncio.to_thread(self._forget, function.id, deployment))
            if isinstance(error, HandlerError):
                # In a deploy, what the author sent is what the caller got wrong.
                raise AuthorError(str(error)) from error
            raise
        return deployment

    def _check(self, manifest: Manifest) -> None:
        """Whether program, weights and specs agree; CallerError or ProgramError. Runs in a thread."""
        absent = self.repository.missing([manifest.program.address])
        if absent:
            raise ConflictError(f"the program of {manifest.name!r}, blob {absent[0]}, is not in the repository: put it")
        program = decode_program(self.repository.read(manifest.program.address))
        validate(program)
        if not self.repository.missing([block.address for block in manifest.blocks]):
            self.repository.check_weights(manifest, program.weights)
        if manifest.handler is None and (manifest.inputs, manifest.outputs) != (program.inputs, program.outputs):
            raise CallerError(f"{manifest.name!r} has no handler, so its inputs and outputs must be its program's")

    def _forget(self, id_: FunctionId, deployment: Deployment) -> None:
        try:
            self.repository.remove(deployment.name, deployment.version)
        except NotFoundError:
            # Its owner removed it meanwhile.
            return
        finally:
            self._effects.functions.pop(id_, None)

    async def remove(self, name: FunctionName, version: int | None) -> None:
        """Take away one version, or all with None; what runs now still ends. NotFoundError."""
        versions = await asyncio.to_thread(self.repository.remove, name, version)
        for gone in versions:
            id_ = function_id(name, gone)
            self._post(Removed(id_))
            self._effects.functions.pop(id_, None)
        await asyncio.to_thread(self.repository.collect, clock.wall(), COLLECT_GRACE_S)

    async def load(self, name: FunctionName, version: int | None) -> None:
        """Wake a function, available again if it was unloaded; raises why it does not wake."""
        id_ = function_id(name, self.function(name, version).version)
        await self._ask(id_, LoadAsked(id_))

    async def unload(self, name: FunctionName, version: int | None) -> None:
        """Make a version, or all with None, give back their memory and answer no more until loaded."""
        self.function(name, version)
        for function in list(self._effects.functions.values()):
            if function.deployment.name == name and version in (None, function.deployment.version):
                self._post(UnloadAsked(function.id))

    def function(self, name: FunctionName, version: int | None) -> FunctionView:
        """One version, or the one that answers for the name; NotFoundError."""
        versions = self._mind.state.versions.get(name, [])
        asked = version if version is not None else (versions[-1] if versions else None)
        function = None if asked is None else self._effects.functions.get(function_id(name, asked))
        if function is None:
            known = f"; its versions: {versions}" if versions else ""
            raise NotFoundError(f"no function {name if version is None else f'{name}@{version}'!r} here{known}")
        return self._view(function)

    def functions(self) -> list[FunctionView]:
        """Every version of every function, by name and number."""
        ordered = sorted(self._effects.functions.values(), key=lambda f: (f.deployment.name, f.deployment.version))
        return [self._view(function) for function in ordered]

    def _view(self, function: DeployedFunction) -> FunctionView:
        versions = self._mind.state.versions.get(function.deployment.name, [])
        latest = bool(versions) and versions[-1] == function.deployment.version
        return FunctionView(function, self._mind.state.functions.get(function.id), latest, self.host)

    # Within

    async def _ask(self, id_: FunctionId, event: Event) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._effects.announced.setdefault(id_, []).append(future)
        self._post(event)
        await future

    def _post(self, event: Event) -> None:
        """Every event comes through here: a mind that fails ends the node rather than going on wrong."""
        if self._broken.done():
            raise OverwinterError("the node has failed and is stopping")
        try:
            self._loop.post(event)
        except Exception as error:  # noqa: BLE001 - the border to the mind: nothing may go on after it failed
            self._broken.set_exception(error)
            self._effects.close()

    def _restore(self) -> None:
        """Tell the mind of every function that the repository knows; keep of the host store what they need."""
        self.repository.forget_unproven()
        functions = [DeployedFunction(deployment) for deployment in self.repository.deployments()]
        self.host.sweep([blob for function in functions for blob in function.blobs])
        for function in functions:
            self._effects.functions[function.id] = function
            resident = all(self.host.holds(blob.address) for blob in function.blobs)
            self._post(Deployed(function.spec(), resident=resident))


@asynccontextmanager
async def running(
    config: NodeConfig, environment: Mapping[str, str], log: Callable[[str], None]
) -> AsyncIterator[Node]:
    """A node over its data directory, from its start to its clean stop. ConflictError if another node has it."""
    with ExitStack() as stack:
        repository = Repository(Path(config.data))
        stack.callback(repository.close)
        stack.callback(os.close, _owned(Path(config.data) / "node.lock"))
        place = Path(config.host_store) / f"overwinter-{repository.node_identity}"
        host = HostStore(place, repository, config.host_bytes)
        if not config.keep_warm:
            stack.callback(_leave, host)
        file = stack.enter_context(_journal_file(config.journal))
        node = Node(config, repository, host, Mind(config.mind))
        node.journal = Journal(config.mind, config.journal_ring, file, partial(_journal_lost, log))
        async with asyncio.TaskGroup() as tasks:
            node._effects = NodeEffects(host, tasks)
            node._loop = Loop(node._mind, node.journal, node._effects)
            node._effects.post = node._post
            node.processes = node._effects.processes = Processes(node._effects, environment, log)
            node.processes.start()
            try:
                node._restore()
                yield node
            finally:
                node._effects.close()
                await node.processes.close()


def _journal_file(path: str | None) -> AbstractContextManager[IO[bytes] | None]:
    """Unbuffered, so that a crash loses no step. A file is one mind's life: the one before gets a number."""
    if path is None:
        return nullcontext()
    if os.path.exists(path):
        number = next(number for number in count(1) if not os.path.exists(f"{path}.{number}"))
        os.rename(path, f"{path}.{number}")
    return open(path, "wb", buffering=0)


def _journal_lost(log: Callable[[str], None], error: OSError) -> None:
    log(f"the journal's file ends here, the node goes on: {error}")


def _leave(host: HostStore) -> None:
    """Give the host store's memory back."""
    host.sweep([])
    host.root.rmdir()


def _owned(path: Path) -> int:
    """The lock that says whose the data directory is; it goes with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConflictError(f"another node already serves {path.parent}: stop it, or choose another --data") from None
    return fd

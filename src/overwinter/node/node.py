"""One machine's node: a scheduler, its loop and hands, a repository, a host store, and what callers may ask."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from overwinter.core.config import NodeConfig
from overwinter.core.errors import (
    AuthorError,
    CallerError,
    ConflictError,
    HandlerError,
    NotFoundError,
    OverwinterError,
    TooLargeError,
)
from overwinter.core.events import Arrived, Cancelled, Deployed, Event, LoadAsked, Removed, UnloadAsked
from overwinter.core.ids import FunctionId, FunctionName, RequestId, Seconds, StoreName, TenantId, function_id
from overwinter.core.journal import Journal
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile
from overwinter.core.profiling import Tell, Wanted
from overwinter.core.tensor import Tensor
from overwinter.core.versions import Shares, Versions, default_of
from overwinter.model.program import decode_program, validate
from overwinter.node import clock
from overwinter.node.effects import NodeEffects, Payload
from overwinter.node.functions import DeployedFunction, blobs_by_store
from overwinter.node.log import Log
from overwinter.node.loop import Loop
from overwinter.node.pipelines import Pipelines, PipelineView
from overwinter.node.processes import Processes
from overwinter.node.profiles import Profiles
from overwinter.node.quarantine import Quarantine
from overwinter.node.quotas import Quotas
from overwinter.node.telemetry import Telemetry
from overwinter.node.threads import Threads
from overwinter.node.traffic import Traffic, who_stays
from overwinter.node.views import DeployedVersion, FunctionView, Reply, TenantBlocks
from overwinter.scheduler.scheduler import Scheduler
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Deployment, Manifest, encode_manifest
from overwinter.store.repository import Repository
from overwinter.telemetry.pipelines import PipelineStatistics

PROGRAM_BYTES_MAX = 4 << 20
"""A program is read as a whole, and its hundred thousands of calls are checked."""


class Node:
    """Serves functions. Made by `running`, which starts and stops all that belongs to it."""

    def __init__(self, config: NodeConfig, repository: Repository, hosts: HostStores, scheduler: Scheduler) -> None:
        self.config = config
        self.repository = repository
        self.hosts = hosts
        self._pipelines = Pipelines(self, repository)
        self._traffic = Traffic(self, self._pipelines, repository.traffic)
        self._quarantine = Quarantine(repository.root / "quarantine.json")
        self._scheduler = scheduler
        self._last_request = 0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Set by `running`, in the order in which they need each other.
        self._effects: NodeEffects
        # One at a time: threads that decode hold the interpreter's lock, each for itself.
        self._reader = Threads(1, "programs")
        self._quotas: Quotas
        self._loop: Loop
        self.processes: Processes
        self.profiler: Profiles
        self.telemetry: Telemetry
        self.journal: Journal

    # What callers ask

    def live(self) -> bool:
        """Whether the node's loop still works."""
        return not self._broken.done()

    def ready(self) -> bool:
        """Whether workers can be forked."""
        return self.live() and self.processes.is_up()

    async def broken(self) -> None:
        """Wait until the node cannot go on, and raise why."""
        await asyncio.shield(self._broken)

    async def infer(
        self,
        name: FunctionName,
        version: int | None,
        inputs: list[Tensor],
        timeout_s: float | None,
        priority: int,
        due: Seconds | None = None,
    ) -> Reply:
        """Run a function or a pipeline on inputs that match its specs; wakes it if needed. `timeout_s` bounds the wait,
        at most to its own; `priority` 1 goes first, 0 is 100; `due`: the due time, if not by its own SLO. Raises core
        errors.
        """
        if name in self._pipelines:
            return await self._pipelines.infer(name, version, inputs, timeout_s, priority)
        self._last_request += 1
        request = RequestId(self._last_request)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._effects.payloads[request] = Payload(inputs, future)
        deadline = None if timeout_s is None else Seconds(clock.now() + timeout_s)
        self.post(Arrived(request, name, version, deadline, priority, due))
        try:
            return await future
        except asyncio.CancelledError:
            self._effects.payloads.pop(request, None)
            self.post(Cancelled(request))
            raise

    async def deploy(self, manifest: Manifest, functions_max: int | None = None) -> DeployedVersion:
        """Register a version whose blocks are in the repository, and try it; raises the error of its trial. It then
        answers for its name. `functions_max`: its tenant's limit, if lower than the node's.
        """
        nbytes = len(encode_manifest(manifest))
        with self._quotas.deploying(manifest.tenant, nbytes, functions_max) as counted:
            return await self._deploy(manifest, counted)

    async def _deploy(self, manifest: Manifest, counted: Callable[[], None]) -> DeployedVersion:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._reader)
        await in_thread(self._check, manifest)
        if not self._versions_of(manifest.name).shares:
            self._pipelines.protect(manifest.name, manifest)
        deployment = await self._register(manifest)
        try:
            function = DeployedFunction(deployment, self.config.scheduler.memory_bytes)
            function.profile = await asyncio.to_thread(self.profiler.stored, function)
            self._effects.functions[function.id] = function
            counted()
            function.on_trial = True
            await self._ask(function.id, Deployed(function.spec(), on_trial=True))
            function.on_trial = False
            await asyncio.to_thread(self.repository.prove, deployment.name, deployment.version)
        except BaseException as error:
            id_ = function_id(deployment.name, deployment.version)
            if id_ in self._effects.functions and not self._broken.done():
                self.post(Removed(id_))
            self._effects.functions.pop(id_, None)
            await asyncio.shield(asyncio.to_thread(self._forget, deployment))
            if isinstance(error, HandlerError):
                # In a deploy, what the author sent is what the caller got wrong.
                raise AuthorError(str(error)) from error
            raise
        if self.config.profile_on_deploy:
            self.profiler.measure_soon(function)
        told = filter(None, (function.warning(), who_stays(self._versions_of(deployment.name).shares)))
        return DeployedVersion(deployment.name, deployment.version, "\n".join(told))

    async def _register(self, manifest: Manifest) -> Deployment:
        """A new version, before its trial. If its caller was cancelled it is removed again, because the thread
        continues.
        """
        register = partial(self.repository.register, manifest, clock.wall(), proven=False)
        registering = asyncio.get_running_loop().run_in_executor(self._reader, register)
        try:
            return await asyncio.shield(registering)
        except asyncio.CancelledError:
            with suppress(OverwinterError):
                await asyncio.to_thread(self._forget, await registering)
            raise

    async def profile(self, name: FunctionName, version: int | None, wanted: Wanted, tell: Tell) -> Profile:
        """Measure the unknown configurations of a function on this machine; `tell` gets the progress. NotFoundError,
        ConflictError when it is unloaded, CallerError for what cannot be measured, WorkerError.
        """
        if self.function(name, version).life == "unloaded":
            raise ConflictError(f"{name!r} is unloaded, and cannot be measured: load it first")
        return await self.profiler.measure(self._deployed(name, version), wanted, tell)

    def known_profile(self, name: FunctionName, version: int | None) -> Profile:
        """The profile of a function on this machine; NotFoundError also when there is none."""
        profile = self._deployed(name, version).profile
        if profile is None:
            raise NotFoundError(f"{name!r} was not measured on this machine: `overwinter profile {name}`")
        return profile

    def _check(self, manifest: Manifest) -> None:
        """Whether program, weights and specs agree; CallerError or ProgramError. Runs in a thread."""
        blobs = [blob.address for blob in manifest.blobs()]
        absent = self.repository.missing(manifest.tenant, blobs, clock.wall())
        address = manifest.program.address
        if address in absent:
            raise ConflictError(f"the program of {manifest.name!r}, blob {address}, is not in the repository: put it")
        nbytes = self.repository.path(address).stat().st_size
        if nbytes > PROGRAM_BYTES_MAX:
            raise TooLargeError(f"the program of {manifest.name!r} has {nbytes} bytes; at most {PROGRAM_BYTES_MAX}")
        program = decode_program(self.repository.read(address))
        validate(program)
        if not absent:
            self.repository.check_weights(manifest, program.weights)
        if manifest.handler is None and (manifest.inputs, manifest.outputs) != (program.inputs, program.outputs):
            raise CallerError(f"{manifest.name!r} has no handler, so its inputs and outputs must be its program's")
        unnumbered = DeployedFunction(Deployment(manifest.name, 0, manifest, 0.0))
        unnumbered.on_trial = True
        unnumbered.check_messages()

    def _forget(self, deployment: Deployment) -> None:
        with suppress(NotFoundError):
            # Its owner may have removed it meanwhile.
            self.repository.remove(deployment.name, deployment.version)

    async def remove(self, name: FunctionName, version: int | None) -> None:
        """Remove one version, or all with None; its runs end. NotFoundError; ConflictError if a pipeline needs it."""
        if name in self._pipelines:
            await self._pipelines.remove(name, version)
            return
        self._protect(name, version)
        versions = await asyncio.to_thread(self.repository.remove, name, version)
        for gone in versions:
            id_ = function_id(name, gone)
            self.post(Removed(id_))
            self._effects.functions.pop(id_, None)
            self._quarantine.forget(id_)
        await asyncio.to_thread(self.repository.collect, clock.wall(), self.config.unneeded_keep_s)

    async def load(self, name: FunctionName, version: int | None) -> None:
        """Wake a function, available again if it was unloaded; raises why it does not wake. A pipeline: all of its."""
        if name in self._pipelines:
            stages = self._pipelines.stages(name, version).values()
            await asyncio.gather(*(self.load(stage.function, stage.version) for stage in stages))
            return
        shares = () if version is not None else self._versions_of(name).shares
        asked: list[int | None] = [share.version for share in shares] or [version]
        ids = [function_id(name, self.function(name, each).version) for each in asked]
        await asyncio.gather(*(self._ask(id_, LoadAsked(id_)) for id_ in ids))
        for id_ in ids:
            self._quarantine.forget(id_)

    async def unload(self, name: FunctionName, version: int | None) -> None:
        """Make a version, or all with None, give back their memory and answer no more until loaded."""
        if name in self._pipelines:
            raise ConflictError(f"{name!r} is a pipeline and holds no memory of its own: unload its functions")
        self.function(name, version)
        for function in list(self._effects.functions.values()):
            if function.deployment.name == name and version in (None, function.deployment.version):
                self.post(UnloadAsked(function.id))

    async def set_traffic(self, name: FunctionName, shares: Shares) -> None:
        """Say which versions of a function get the requests that name none; raises why they cannot."""
        await self._traffic.set(name, shares)

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId) -> PipelineView:
        """Register functions to be called as one, in place of a pipeline of that name; raises why it cannot be."""
        with self._quotas.deploying_pipeline(self._pipelines.tenants(), pipeline.name, tenant):
            return await self._pipelines.deploy(pipeline, tenant)

    def pipelines_seen(self) -> list[PipelineStatistics]:
        """The statistics of each pipeline."""
        return self._pipelines.seen()

    def pipelines(self) -> list[PipelineView]:
        """Every pipeline, by name."""
        return self._pipelines.views()

    def owner(self, name: FunctionName) -> TenantId:
        """The tenant of a function or a pipeline, also of one on trial; NotFoundError."""
        if name in self._pipelines:
            return self._pipelines.view(name, None).tenant
        for function in self._effects.functions.values():
            if function.deployment.name == name:
                return function.manifest.tenant
        raise NotFoundError(f"no function {name!r} here")

    def view(self, name: FunctionName, version: int | None) -> FunctionView | PipelineView:
        """What answers calls of that name: a pipeline, or a function; NotFoundError."""
        return self._pipelines.view(name, version) if name in self._pipelines else self.function(name, version)

    def function(self, name: FunctionName, version: int | None) -> FunctionView:
        """One version, or the one that answers for the name; NotFoundError."""
        return self._view(self._deployed(name, version))

    def _deployed(self, name: FunctionName, version: int | None) -> DeployedFunction:
        known = self._versions_of(name)
        asked = version if version is not None else (known.default if known.numbers else None)
        function = None if asked is None else self._effects.functions.get(function_id(name, asked))
        if function is None and name in self._pipelines:
            its = ", ".join(sorted({stage.function for stage in self._pipelines.stages(name, None).values()}))
            raise NotFoundError(f"{name!r} is a pipeline and no function; ask about its functions: {its}")
        if function is None:
            others = f"; its versions: {known.numbers}" if known.numbers else ""
            raise NotFoundError(f"no function {name if version is None else f'{name}@{version}'!r} here{others}")
        return function

    def _versions_of(self, name: FunctionName) -> Versions:
        """The versions of a function that answer."""
        return self._scheduler.state.versions.get(name) or Versions()

    def versions(self, name: FunctionName) -> list[int]:
        """The versions of a function or a pipeline that answer, ascending."""
        if name in self._pipelines:
            return [self._pipelines.view(name, None).version]
        return list(self._versions_of(name).numbers)

    def functions(self, tenant: TenantId | None = None) -> Iterator[FunctionView]:
        """Every version of every function, or of one tenant's, by name and number, each as it is at its turn."""
        wanted = [each for each in self._effects.functions.values() if tenant in (None, each.manifest.tenant)]
        ordered = sorted(wanted, key=lambda f: (f.deployment.name, f.deployment.version))
        blocks: dict[tuple[StoreName, TenantId], TenantBlocks] = {}
        for function in ordered:
            # It may have been removed since.
            if function.id in self._effects.functions:
                whose = (function.store, function.manifest.tenant)
                if whose not in blocks:
                    blocks[whose] = self._blocks_for(function)
                yield self._view(function, blocks[whose])

    def _view(self, function: DeployedFunction, blocks: TenantBlocks | None = None) -> FunctionView:
        versions = self._versions_of(function.deployment.name)
        state = self._scheduler.state.functions.get(function.id)
        return FunctionView(function, state, versions, blocks or self._blocks_for(function))

    def _blocks_for(self, function: DeployedFunction) -> TenantBlocks:
        return TenantBlocks(self.hosts.store(function.store), self._scheduler.state, function.manifest.tenant)

    # What profiling needs

    def busy(self) -> bool:
        """Whether any request is under way, or any worker does something."""
        return bool(self._effects.payloads) or not all(
            worker.is_idle for worker in self._scheduler.state.workers.values()
        )

    async def wake(self, function: DeployedFunction) -> None:
        """Bring a function's blocks into memory; raises why not, also if it was unloaded: that is not to be undone."""
        name, version = function.deployment.name, function.deployment.version
        if self.function(name, version).life == "unloaded":
            raise ConflictError(f"{function.id} was unloaded meanwhile: load it first")
        await self.load(name, version)

    # Within

    def _protect(self, name: FunctionName, gone: int | None) -> None:
        """ConflictError if a pipeline needs a version, or with None any, of the function that is to go."""
        versions = self._versions_of(name)
        left = [version for version in versions.numbers if gone not in (None, version)]
        # One that has a share cannot go alone.
        default = self.function(name, default_of(left, versions.shares)) if left else None
        self._pipelines.protect(name, default, set(versions.numbers) - set(left))

    async def _ask(self, id_: FunctionId, event: Event) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._effects.load_waiters.setdefault(id_, []).append(future)
        self.post(event)
        await future

    def post(self, event: Event) -> None:
        """Every event comes through here: a scheduler that fails ends the node rather than going on wrong."""
        if self._broken.done():
            raise OverwinterError("the node has failed and is stopping")
        try:
            self._loop.post(event)
        except Exception as error:  # noqa: BLE001 - the border to the scheduler: nothing may go on after it failed
            if self._scheduler.in_hand is not None:
                self._quarantine.add(self._scheduler.in_hand, error)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Nothing may go on after this: the node ends."""
        if not self._broken.done():
            self._broken.set_exception(error)
            self._effects.close()

    def _is_resident(self, function: DeployedFunction) -> bool:
        host = self.hosts.store(function.store)
        return all(host.holds(blob.address) for blob in function.blobs)

    def _restore(self, log: Log) -> None:
        """Tell the scheduler of every function that the repository knows; keep of the host store what they need."""
        self.repository.forget_unproven()
        deployments, memory_bytes = self.repository.deployments(), self.config.scheduler.memory_bytes
        functions = [DeployedFunction(deployment, memory_bytes) for deployment in deployments]
        self.hosts.sweep(blobs_by_store(functions))
        # A function that is there in part must be loaded as a whole: what no whole one shares of it goes.
        whole = [function for function in functions if self._is_resident(function)]
        self.hosts.sweep(blobs_by_store(whole))
        for function in functions:
            function.profile = self.profiler.stored(function)
            self._effects.functions[function.id] = function
            quarantined = self._quarantine.reason(function.id)
            if quarantined:
                log(f"function {function.id} is out of service until it is loaded: {quarantined}", function=function.id)
            self.post(Deployed(function.spec(), resident=self._is_resident(function), quarantined=quarantined))
        self._traffic.restore()
        limited = {f"function {function.id}": function.deployment.limited for function in functions}
        limited |= {f"pipeline {name!r}": told for name, told in self._pipelines.restore().items()}
        for what, every in limited.items():
            for told in every:
                log(f"{what}: {told}")

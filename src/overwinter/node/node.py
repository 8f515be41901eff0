"""The node of one machine: the operations that callers may request."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial

from overwinter.core.call import Call, Result
from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.events import UnloadAsked
from overwinter.core.ids import FunctionName, TenantId, function_id
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileOptions, ReportProgress
from overwinter.core.versions import Shares
from overwinter.node.deploys import Deploys
from overwinter.node.fair_queue import FairQueue
from overwinter.node.functions import DeployedFunction
from overwinter.node.loop import Loop
from overwinter.node.parts import Parts
from overwinter.node.pipelines import Pipelines, PipelineView
from overwinter.node.profiles import Profiles
from overwinter.node.telemetry import FindFunction, Telemetry
from overwinter.node.traffic import TrafficSplits
from overwinter.node.views import DeployedVersion, DeployedView
from overwinter.store.manifest import Manifest


class Node:
    """Serves functions. `bootstrap.running` creates it, and starts and stops its parts."""

    def __init__(
        self,
        parts: Parts,
        loop: Loop,
        pipelines: Pipelines,
        traffic: TrafficSplits,
        deploys: Deploys,
        profiler: Profiles,
        telemetry: Telemetry,
        find: FindFunction,
    ) -> None:
        """`find` returns one version of a function, or its default version; it may raise NotFoundError."""
        self.parts = parts
        self.repository = parts.repository
        self.profiler = profiler
        self.telemetry = telemetry
        self._registry = parts.registry
        self._calls = parts.calls
        self._loop = loop
        self._pipelines = pipelines
        self._traffic = traffic
        self._deploys = deploys
        self._find = find
        self._load_queue, self._unload_queue = FairQueue(), FairQueue()

    def live(self) -> bool:
        """Whether the node's loop still works."""
        return not self._loop.broken.done()

    def ready(self) -> bool:
        """Whether workers can be forked."""
        return self.live() and self.parts.processes.is_up()

    async def until_ready(self) -> None:
        """Wait until workers can be forked for the first time."""
        await self.parts.processes.zygotes.up.wait()

    async def until_broken(self) -> None:
        """Wait until an error must end the node, and raise it."""
        await asyncio.shield(self._loop.broken)

    def infer(self, call: Call) -> Awaitable[Result]:
        """Run a function or a pipeline; raises OverwinterError."""
        # No separate coroutine, because this is called for every request.
        return self._pipelines.infer(call) if call.name in self._pipelines else self._calls.infer(call)

    async def profile(
        self, name: FunctionName, version: int | None, options: ProfileOptions, report: ReportProgress
    ) -> Profile:
        """Measure configurations of a function on this machine, and skip known ones unless `options.again`. `report`
        receives the progress. Raises NotFoundError, ConflictError for an unloaded function or a program in slices,
        CallerError for impossible configurations, WorkerError.
        """
        function = self._find(name, version)
        if self._registry.view(name, version).lifecycle == "unloaded":
            raise ConflictError(f"{name!r} is unloaded, and cannot be measured: load it first")
        if function.program_part.slice is not None:
            raise ConflictError(
                f"the program of {name!r} is cut into slices, and only whole programs are measured: deploy it under "
                'another name with device = "cpu", and measure that'
            )
        return await self.profiler.measure(function.program_part, options, report)

    async def known_profile(self, name: FunctionName, version: int | None) -> Profile:
        """Return the profile of a function on this machine; raise NotFoundError if there is none."""
        profile = await self.profiler.known(self._find(name, version).program_part)
        if profile is None:
            raise NotFoundError(f"{name!r} was not measured on this machine: `overwinter profile {name}`")
        return profile

    # Deploys, removals and loads

    async def deploy(self, manifest: Manifest, functions_max: int | None = None) -> DeployedVersion:
        """Register a version whose blobs are in the repository, and try it; raise the error of its trial. If it
        passes, it becomes the default version, unless other versions are promoted. `functions_max`: its tenant's
        limit, if lower than the node's.
        """
        return await self._deploys.deploy(manifest, functions_max)

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId) -> PipelineView:
        """Register functions to be called as one, replacing a pipeline of that name; raise an error if that is
        impossible.
        """
        return await self._deploys.deploy_pipeline(pipeline, tenant)

    async def remove(self, name: FunctionName, version: int | None) -> None:
        """Remove one version, or all with None. Runs in progress get the drain timeout to end. Raises NotFoundError, or
        ConflictError if a pipeline needs it, or if it has a share of the requests and other versions remain.
        """
        await (self._pipelines if name in self._pipelines else self._deploys).remove(name, version)

    async def load(self, name: FunctionName, version: int | None) -> None:
        """Wake a function, or all functions of a pipeline, also if it was unloaded; raise an error if one does not
        wake.
        """
        if name in self._pipelines:
            stages = self._pipelines.stages(name, version).values()
            asked = list(dict.fromkeys((stage.function, stage.version) for stage in stages))
        else:
            asked = [(name, version)]
        functions = [function for each in asked for function in self._answering(*each)]
        if on_trial := [function.id for function in functions if function.on_trial]:
            raise ConflictError(f"{on_trial[0]} is on trial: wait until its deploy has ended")
        if undivided := [function.id for function in functions if function.undivided]:
            raise ConflictError(
                f"{undivided[0]} cannot be loaded, because its program could not be read when the node started: deploy "
                "it again, or restart the node"
            )
        for function in functions:
            self.parts.pool_calls.cancel_after_runs(function.id)
        parts = [part for function in functions for part in function.parts()]
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    # One request may load hundreds of functions.
                    await self._load_queue.turn(part.manifest.tenant, 0)
                    group.create_task(self._calls.load(part.id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _answering(self, name: FunctionName, version: int | None) -> list[DeployedFunction]:
        """Return this version, or all that get the requests without a version."""
        shares = () if version is not None else self.parts.published.versions(name).shares
        asked: list[int | None] = [share.version for share in shares] or [version]
        return [self._registry.deployed(name, each) for each in asked]

    async def unload(self, name: FunctionName, version: int | None) -> None:
        """Unload a version, or all with None: it releases its memory and answers no requests until it is loaded. Raises
        NotFoundError, or ConflictError for a pipeline or a version on trial.
        """
        if name in self._pipelines:
            raise ConflictError(f"{name!r} is a pipeline and holds no memory of its own: unload its functions")
        tenant = self._registry.deployed(name, version).manifest.tenant
        for number in self._registry.versions(name) if version is None else [version]:
            # There may be thousands.
            await self._unload_queue.turn(tenant, 0)
            function = self._registry.functions.get(function_id(name, number))
            if function is None:
                # It was removed meanwhile.
                continue
            if function.on_trial:
                if version is None:
                    continue
                raise ConflictError(f"{function.id} is on trial: wait for the end of its deploy, or remove it")
            *others, last = function.parts()
            self._unload([last])
            if function.program is None:
                self._unload(others)
            else:
                self.parts.pool_calls.after_runs(function.id, partial(self._unload, others))

    def _unload(self, parts: Sequence[DeployedFunction]) -> None:
        for part in reversed(parts):
            self._loop.post(UnloadAsked(part.id))

    async def set_traffic(self, name: FunctionName, shares: Shares) -> None:
        """Set the versions that get the requests without a version; raise an error if that is impossible."""
        await self._traffic.set(name, shares)

    # Views

    def owner(self, name: FunctionName) -> TenantId:
        """Return the tenant of a function or a pipeline, also of one on trial; raise NotFoundError."""
        return self._pipelines.view(name, None).tenant if name in self._pipelines else self._deploys.owner(name)

    def view(self, name: FunctionName, version: int | None) -> DeployedView | PipelineView:
        """Return a pipeline, one version of a function, or its default version; raise NotFoundError."""
        return (self._pipelines.view if name in self._pipelines else self._registry.view)(name, version)

    def versions(self, name: FunctionName) -> list[int]:
        """Return the versions of a function that passed their trial, or that of a pipeline, ascending."""
        if name in self._pipelines:
            return [self._pipelines.view(name, None).version]
        return self._registry.versions(name)

    def functions(self, tenant: TenantId | None = None) -> Iterator[DeployedView]:
        """Yield every version of every function, or of those of one tenant, by name and number, each in its state at
        that moment.
        """
        return self._registry.views(tenant)

    def pipelines(self, tenant: TenantId | None = None) -> Iterator[PipelineView]:
        """Yield every pipeline, or those of one tenant, by name, each in its state at that moment."""
        return self._pipelines.views(tenant)

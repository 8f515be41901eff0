"""Stores the deployed pipelines, and prevents changes of functions that would break them.

A new version of a function that would break a pipeline is refused, and so is the removal of a function that a pipeline
needs. A pipeline calls only functions of its own tenant, so it does not depend on another tenant.

What a check found must still be true when the change is made. So a new pipeline is protected as soon as it is checked,
before it is stored. Deploys and removals of pipelines, removals of versions, promotions and traffic splits, which wait
for the disk, are made one at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property

import msgspec

from overwinter.core.call import Call, Result
from overwinter.core.errors import CallerError, ConflictError, NoSpaceError, NotFoundError, OverloadedError, StoreError
from overwinter.core.function import Availability
from overwinter.core.ids import FunctionName, Seconds, TenantId
from overwinter.core.pipeline import SOURCES_MAX, HasSignature, Pipeline, Signature, Stage, check_pipeline, source_count
from overwinter.core.tensor import TensorSpec
from overwinter.node import clock
from overwinter.node.completion import completed
from overwinter.node.fair_lock import FairLock
from overwinter.node.fair_queue import FairQueue
from overwinter.node.registry import Registry
from overwinter.node.signatures import Signatures
from overwinter.node.stages import Infer, PipelineRun
from overwinter.store.repository import Repository, StoredPipeline
from overwinter.telemetry.histogram import SECONDS, Histogram
from overwinter.telemetry.pipelines import PipelineRequests, PipelineStatistics

TENANT_SOURCES_MAX = 4 * SOURCES_MAX
"""The most sources of tensors of all pipelines of a tenant. The deploy of a function checks each pipeline that uses it.
"""


OPEN_STAGES_MAX = 2048
"""The most stages of all requests of a tenant to pipelines. They may end together, and each end takes some time."""
INPUT_BYTES = 256
"""In the `FairQueue`, each input of a stage counts as this many bytes of a request."""
RETRY_AFTER_S = 1.0


class PipelineSettings(msgspec.Struct, frozen=True):
    """The settings of a pipeline."""

    slo_ms: float | None
    timeout_s: float


class PipelineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a pipeline, for people and programs."""

    name: FunctionName
    version: int
    tenant: TenantId
    state: Availability
    reason: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: PipelineSettings
    stages: Mapping[str, Stage]
    sources: Mapping[str, str]
    """The source of each output."""
    requests: PipelineRequests
    created: float
    """The time of the deploy, in seconds since 1970."""


class _Deployed:
    """A deployed pipeline."""

    def __init__(self, stored: StoredPipeline, signatures: Signatures) -> None:
        self.stored = stored
        self.signatures = signatures
        self.statistics = _empty_statistics(stored.pipeline)


class PipelineView:
    """The current state of a pipeline. Cheap to create: one is created per request."""

    platform = "overwinter_pipeline"

    def __init__(self, known: _Deployed, functions: Registry) -> None:
        self._known = known
        self._stored = stored = known.stored
        self._requests = known.statistics.requests
        self._functions = functions
        self.name: FunctionName = stored.pipeline.name
        self.version: int = stored.version
        self.tenant: TenantId = stored.tenant
        self.settings = PipelineSettings(stored.pipeline.slo_ms, stored.pipeline.timeout_s)

    @cached_property
    def _found(self) -> Signature | CallerError:
        try:
            return self._known.signatures.current()
        except CallerError as fault:
            return fault

    @property
    def fault(self) -> CallerError | None:
        """Why the current versions of its functions do not form a pipeline."""
        return self._found if isinstance(self._found, CallerError) else None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in order; raises an error if they are unknown."""
        return self._valid().inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in order; raises an error if they are unknown."""
        return self._valid().outputs

    @property
    def state(self) -> Availability:
        """READY if a request would be answered, even if its functions are asleep."""
        return "UNAVAILABLE" if self.reason else "READY"

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        if isinstance(self._found, CallerError):
            return str(self._found)
        for name, stage in self._stored.pipeline.stages.items():
            function = self._functions.view(stage.function, stage.version)
            if function.state != "READY":
                return f"function {stage.function!r} of stage {name!r}: {function.reason}"
        return ""

    def info(self, whole: bool = True, /) -> PipelineInfo:
        """Return its full description, in any state and whatever `whole` is."""
        found = Signature((), ()) if isinstance(self._found, CallerError) else self._found
        return PipelineInfo(
            name=self.name,
            version=self.version,
            tenant=self.tenant,
            state=self.state,
            reason=self.reason,
            platform=self.platform,
            inputs=found.inputs,
            outputs=found.outputs,
            settings=self.settings,
            stages=self._stored.pipeline.stages,
            sources=self._stored.pipeline.outputs,
            requests=self._requests,
            created=self._stored.created,
        )

    def _valid(self) -> Signature:
        if isinstance(self._found, CallerError):
            raise self._found
        return self._found


class Pipelines:
    """All pipelines of a node, by name."""

    def __init__(
        self, functions: Registry, infer: Infer, repository: Repository, now: Callable[[], Seconds] = clock.now
    ) -> None:
        """`infer` runs a stage."""
        self._functions = functions
        self._infer = infer
        self._repository = repository
        self._now = now
        self._known: dict[FunctionName, _Deployed] = {}
        self._being_stored: list[Signatures] = []
        """The signatures of pipelines that are being stored."""
        self._checking = asyncio.Lock()
        """Held for one iteration of the loop after each step of a check: concurrent checks take turns."""
        self._open_stages: Counter[TenantId] = Counter()
        """The stages of the requests in progress, by tenant."""
        self._stage_queue = FairQueue()
        """The starts and cancellations of stages: a request may start or cancel all stages of a pipeline together."""
        self.changing = FairLock()
        """Held during the deploy or removal of a pipeline, the removal of versions, a promotion or a traffic split,
        from the check until the change is made.
        """

    # Deploys and removals

    def restore(self, skip: Callable[[StoreError], None]) -> dict[FunctionName, tuple[str, ...]]:
        """Load the stored pipelines at the start. `skip` gets an error for each that cannot be read. Returns a note for
        each setting that exceeded the current bounds and was limited to them, by pipeline.
        """
        self._known = {
            stored.pipeline.name: _Deployed(stored, Signatures(stored.pipeline, stored.tenant, self._functions))
            for stored in self._repository.pipelines(skip)
        }
        return {name: known.stored.limited for name, known in self._known.items()}

    async def deploy(self, pipeline: Pipeline, tenant: TenantId) -> PipelineView:
        """Deploy a pipeline, replacing one of the same name; its requests in progress complete.

        Raises CallerError for an invalid pipeline, NotFoundError for a missing function, ConflictError if the name is a
        function's or a version is on trial, ForbiddenError if the name or a function belongs to another tenant,
        NoSpaceError at a limit.
        """
        check_pipeline(pipeline)
        signatures = Signatures(pipeline, tenant, self._functions)

        def find(name: FunctionName, version: int | None) -> HasSignature:
            self.check_function(name)
            found = signatures.find(name, version)
            if found.state == "LOADING":
                # It is removed if its trial fails.
                raise ConflictError(f"version {version} of {name!r} is on trial: wait until its deploy has ended")
            return found

        async with self.changing.turn(tenant):
            self._check_sources(pipeline, tenant)
            signatures.of(find)
            self._being_stored.append(signatures)
            await completed(self._store(pipeline, tenant, signatures))
        return self.view(pipeline.name, None)

    async def _store(self, pipeline: Pipeline, tenant: TenantId, signatures: Signatures) -> None:
        try:
            stored = await asyncio.to_thread(self._repository.put_pipeline, pipeline, tenant, clock.wall())
        finally:
            self._being_stored.remove(signatures)
        self._known[pipeline.name] = _Deployed(stored, signatures)

    def _check_sources(self, pipeline: Pipeline, tenant: TenantId) -> None:
        """Raise NoSpaceError if the tenant's pipelines would have too many sources. All of them may use one function,
        whose deploy then checks them all.
        """
        others = [known.stored for name, known in self._known.items() if name != pipeline.name]
        own = sum(source_count(stored.pipeline) for stored in others if stored.tenant == tenant)
        if own + source_count(pipeline) > TENANT_SOURCES_MAX:
            raise NoSpaceError(
                f"the pipelines of tenant {tenant!r} have {own} other sources of tensors, and with "
                f"{pipeline.name!r} more than {TENANT_SOURCES_MAX}: remove a pipeline first"
            )

    async def remove(self, name: FunctionName, version: int | None) -> None:
        """Remove a pipeline; its requests in progress complete. Raises NotFoundError."""
        tenant = self.view(name, version).tenant
        async with self.changing.turn(tenant):
            # It may have been removed or replaced since, and the name may be another tenant's.
            if self.view(name, version).tenant != tenant:
                raise NotFoundError(f"pipeline {name!r} was removed")
            await completed(self._remove(name))

    async def _remove(self, name: FunctionName) -> None:
        await asyncio.to_thread(self._repository.remove_pipeline, name)
        self._known.pop(name, None)

    def tenants(self) -> Mapping[FunctionName, TenantId]:
        """Return the names of pipelines, and their tenants."""
        return {name: known.stored.tenant for name, known in self._known.items()}

    def check_function(self, name: FunctionName) -> None:
        """Raise NotFoundError if the name is that of a pipeline, where a function is needed."""
        if name in self._known:
            its = ", ".join(sorted({stage.function for stage in self.stages(name, None).values()}))
            raise NotFoundError(f"{name!r} is a pipeline, not a function; name one of its functions: {its}")

    def __contains__(self, name: FunctionName) -> bool:
        return name in self._known

    def view(self, name: FunctionName, version: int | None) -> PipelineView:
        """Return one pipeline; raise NotFoundError."""
        return PipelineView(self._found(name, version), self._functions)

    def views(self, tenant: TenantId | None = None) -> Iterator[PipelineView]:
        """All pipelines, or one tenant's, by name; each view is created when the iteration reaches it."""
        for name in sorted(name for name, known in self._known.items() if tenant in (None, known.stored.tenant)):
            # It may have been removed since.
            if (known := self._known.get(name)) is not None:
                yield PipelineView(known, self._functions)

    def statistics(self, tenant: TenantId | None) -> list[PipelineStatistics]:
        """The statistics of each pipeline, of all tenants or of one."""
        return [known.statistics for known in self._known.values() if tenant in (None, known.stored.tenant)]

    def stages(self, name: FunctionName, version: int | None) -> Mapping[str, Stage]:
        """Return the stages of a pipeline; raise NotFoundError."""
        return self._found(name, version).stored.pipeline.stages

    async def protect(self, name: FunctionName, default: HasSignature | None, gone: Collection[int] = ()) -> None:
        """Raise ConflictError if a change of a function's versions would break a pipeline, as `protect_at_once` does.

        The event loop runs between the checks of two pipelines. What was found holds when this returns.
        """
        for _ in self._checks(name, default, gone):
            async with self._checking:
                await asyncio.sleep(0)
        # Other functions may have changed meanwhile. The signatures that stayed the same are remembered.
        self.protect_at_once(name, default, gone)

    def protect_at_once(self, name: FunctionName, default: HasSignature | None, gone: Collection[int] = ()) -> None:
        """Raise ConflictError if a change of a function's versions would break a pipeline.

        After the change the default version is `default` (None: there is none), and the versions `gone` are removed.
        """
        for _ in self._checks(name, default, gone):
            pass

    def _checks(self, name: FunctionName, default: HasSignature | None, gone: Collection[int]) -> Iterator[None]:
        """Yield after each pipeline that calls the function; raise ConflictError for a valid one that would break."""

        def find(called: FunctionName, version: int | None) -> HasSignature:
            if called != name or (version is not None and version not in gone):
                return self._functions.view(called, version)
            if version is not None or default is None:
                missing = f"function {name!r}" if version is None else f"version {version} of function {name!r}"
                raise NotFoundError(f"its {missing} would be missing")
            return default

        if default is not None and not gone and self._has_tensors_of(name, default):
            return
        for each in [*(known.signatures for known in self._known.values()), *self._being_stored]:
            if name not in each.functions:
                continue
            try:
                each.of(find)
            except CallerError as error:
                if each.valid:
                    its = each.pipeline.name
                    raise ConflictError(f"{error}; remove pipeline {its!r} first, or change it") from error
            yield

    def _has_tensors_of(self, name: FunctionName, other: HasSignature) -> bool:
        """Whether the default version of a function has the same tensors, so that nothing changes for a pipeline."""
        try:
            default = self._functions.view(name, None)
        except NotFoundError:
            return False
        return (default.inputs, default.outputs) == (other.inputs, other.outputs)

    # Requests

    async def infer(self, call: Call) -> Result:
        """Run a pipeline. Raises NotFoundError, OverloadedError at the limit of open stages, or what `PipelineRun.run`
        raises. `timeout_s` bounds all stages together.
        """
        known = self._found(call.name, call.version)
        stored, statistics, requests = known.stored, known.statistics, known.statistics.requests
        begun = self._now()
        own_s = stored.pipeline.timeout_s
        deadline = Seconds(begun + (own_s if call.timeout_s is None else min(call.timeout_s, own_s)))
        tenant, count = stored.tenant, len(stored.pipeline.stages)
        if self._open_stages[tenant] + count > OPEN_STAGES_MAX:
            most = f"the pipelines of a tenant may have at most {OPEN_STAGES_MAX} stages in progress"
            raise OverloadedError(f"{most}: {count} of {call.name!r} would be too many; try again", RETRY_AFTER_S)

        async def turn(inputs: int) -> None:
            await self._stage_queue.turn(tenant, inputs * INPUT_BYTES)

        run = PipelineRun(stored.pipeline, self._functions, self._infer, call, deadline, self._now, turn)
        self._open_stages[tenant] += count
        requests.running += 1
        try:
            outputs = await run.run()
        except BaseException:
            requests.failed += 1
            raise
        finally:
            requests.running -= 1
            self._open_stages[tenant] -= count
            if not self._open_stages[tenant]:
                del self._open_stages[tenant]
        slo_ms = stored.pipeline.slo_ms
        requests.answered += 1
        seconds = self._now() - begun
        requests.in_slo += slo_ms is None or seconds * 1000 <= slo_ms
        statistics.durations.add(seconds)
        return Result(call.name, stored.version, outputs, run.start)

    def _found(self, name: FunctionName, version: int | None) -> _Deployed:
        known = self._known.get(name)
        if known is None:
            raise NotFoundError(f"no pipeline {name!r} here")
        if version not in (None, known.stored.version):
            raise NotFoundError(f"pipeline {name!r} has only version {known.stored.version}, not {version}")
        return known


def _empty_statistics(pipeline: Pipeline) -> PipelineStatistics:
    return PipelineStatistics(pipeline.name, pipeline.slo_ms, PipelineRequests(), Histogram(SECONDS))

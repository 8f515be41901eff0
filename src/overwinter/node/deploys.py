"""Deploys and removes functions, and restores those of an earlier run of the node."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from overwinter.core.errors import (
    AuthorError,
    CallerError,
    ConflictError,
    ForbiddenError,
    HandlerError,
    NoSpaceError,
    NotFoundError,
    OverwinterError,
    StoreError,
    TooLargeError,
    no_function,
)
from overwinter.core.events import Deployed, Removed
from overwinter.core.function import reset_settings
from overwinter.core.ids import Address, FunctionName, StoreName, TenantId, function_id, is_part, whole_id
from overwinter.core.pipeline import Pipeline
from overwinter.core.tensor import requests_of_run_max
from overwinter.core.versions import check_removal, default_of
from overwinter.model.program import Program, decode_program, validate
from overwinter.node import clock
from overwinter.node.completion import completed
from overwinter.node.device_fit import Placement, may_hold, placement
from overwinter.node.fair_queue import FairQueue
from overwinter.node.functions import DeployedFunction, blobs_by_store
from overwinter.node.parts import Parts
from overwinter.node.pipelines import Pipelines, PipelineView
from overwinter.node.profiles import Profiles
from overwinter.node.quarantine import Quarantine
from overwinter.node.quotas import Quotas
from overwinter.node.threads import Threads
from overwinter.node.traffic import TrafficSplits, unchanged_traffic
from overwinter.node.views import DeployedVersion
from overwinter.store.blocks import without_addresses
from overwinter.store.host import page_bytes
from overwinter.store.layouts import check_weights
from overwinter.store.manifest import Deployment, Manifest, encode_manifest
from overwinter.store.repository import absent_error

PROGRAM_BYTES_MAX = 4 << 20
"""The most bytes of a program. It is read as a whole, and its hundreds of thousands of calls are checked."""
BLOBS_MAX = 2048
"""The most blobs of a function. A start opens and sends all of them, and a worker may have 4096 open files."""


class Deploys:
    """Deploys, removes and restores functions. Used on the event loop's thread only; other threads do slow work."""

    def __init__(
        self, parts: Parts, pipelines: Pipelines, traffic: TrafficSplits, quarantine: Quarantine, profiler: Profiles
    ) -> None:
        self._config = parts.config
        self._repository = parts.repository
        self._unneeded = parts.unneeded
        self._faults = parts.faults
        self._hosts = parts.hosts
        self._registry = parts.registry
        self._calls = parts.calls
        self._pool_calls = parts.pool_calls
        self._post = parts.post
        self._log = parts.log
        self._versions_of = parts.published.versions
        self._removal_queue = FairQueue()
        self._pipelines = pipelines
        self._traffic = traffic
        self._quotas = Quotas(parts.config, parts.registry.deployed_functions)
        self._quarantine = quarantine
        self._profiler = profiler
        # One thread, because each thread that decodes holds the GIL.
        self._reader = Threads(1, "programs")

    async def deploy(self, manifest: Manifest, functions_max: int | None) -> DeployedVersion:
        """Register a version whose blobs are in the repository, and try it; raise the error of its trial. If it
        passes, it becomes the default version, unless other versions are promoted. `functions_max`: its tenant's
        limit, if lower than the node's.
        """
        nbytes = len(encode_manifest(manifest))
        with self._quotas.deploying(manifest.tenant, nbytes, functions_max) as counted:
            return await self._deploy(manifest, counted)

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId) -> PipelineView:
        """Register functions to be called as one, replacing a pipeline of that name; raise an error if that is
        impossible.
        """
        with self._quotas.deploying_pipeline(self._pipelines.tenants(), pipeline.name, tenant):
            return await self._pipelines.deploy(pipeline, tenant)

    async def _deploy(self, manifest: Manifest, counted: Callable[[DeployedFunction], None]) -> DeployedVersion:
        """Register and try a version; `counted` is called as soon as it counts as deployed."""
        with suppress(NotFoundError):
            # Before any check whose error could name the function's pipelines.
            if self.owner(manifest.name) != manifest.tenant:
                raise ForbiddenError(f"function {manifest.name!r} belongs to another tenant: choose another name")
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._reader)
        program, placed = await in_thread(self._check, manifest)
        reset = self._reset_text(manifest)
        await self._traffic.check_before_trial(manifest, self._versions_of)
        deployment = await self._register(manifest)
        try:
            function = DeployedFunction(deployment, self._config.scheduler.memory_bytes)
            _divide(function, program, placed)
            # It has many times the bytes of its file, and a trial may take long.
            del program
            for part in function.parts():
                part.use_profile(await asyncio.to_thread(self._profiler.stored, part))
            self._registry.add(*function.parts())
            counted(function)
            function.on_trial = True
            # Pipelines and promotions may have changed since the check.
            function.check_publish = partial(self._traffic.check_new, manifest, self._versions_of, deployment.version)
            for part in function.parts():
                if function.id not in self._registry.functions:
                    # Its tenant removed it between the trials of two parts. A part that the registry does not have
                    # would end the node.
                    raise NotFoundError(f"function {function.id} was removed")
                await self._calls.ask(part.id, Deployed(part.spec(), on_trial=True))
            function.on_trial = False
            await asyncio.to_thread(self._repository.prove, deployment.name, deployment.version)
        except BaseException as error:
            id_ = function_id(deployment.name, deployment.version)
            registered = self._registry.remove(id_)
            if registered is not None:
                # A node that has failed removes the version at its next start.
                with suppress(OverwinterError):
                    self._removed(registered)
            await asyncio.shield(asyncio.to_thread(self._forget, deployment))
            if isinstance(error, HandlerError):
                # In a deploy, the author of the handler is the caller.
                raise AuthorError(str(error)) from error
            raise
        if self._config.profile_on_deploy and function.program_part.slice is None:
            self._profiler.measure_soon(function.program_part)
        messages = function.warning(), reset, unchanged_traffic(self._versions_of(deployment.name).shares)
        return DeployedVersion(deployment.name, deployment.version, "\n".join(filter(None, messages)))

    def _reset_text(self, manifest: Manifest) -> str:
        """Return a note about settings that the newest version has and a new one lacks; empty if there are none."""
        for version in self._versions_of(manifest.name).numbers[-1:]:
            newest = self._registry.functions[function_id(manifest.name, version)].manifest
            if names := ", ".join(reset_settings(newest.settings, manifest.settings)):
                return f"unlike version {version}, it has the default of {names}: to keep one, set it and deploy again"
        return ""

    async def _register(self, manifest: Manifest) -> Deployment:
        """Register a new version, before its trial. If its caller is cancelled, the version is removed again, because
        the thread continues.
        """
        register = partial(self._repository.register, manifest, clock.wall(), proven=False)
        registering = asyncio.get_running_loop().run_in_executor(self._reader, register)
        try:
            return await asyncio.shield(registering)
        except asyncio.CancelledError:
            with suppress(OverwinterError):
                await asyncio.to_thread(self._forget, await registering)
            raise

    def _check(self, manifest: Manifest) -> tuple[Program, Placement]:
        """Return the program, and how it runs on devices; raise CallerError or ProgramError unless the manifest is
        consistent with the program, the repository and the node, ConflictError if blobs are missing, or NoSpaceError if
        the devices are too small. Runs in a thread.
        """
        blobs = [blob.address for blob in manifest.blobs()]
        if len(blobs) > BLOBS_MAX:
            raise TooLargeError(
                f"{manifest.name!r} has {len(blobs)} blobs (program, handler, assets, blocks); at most "
                f"{BLOBS_MAX}: put several weights into a block, or several assets into an archive"
            )
        absent = self._repository.missing(manifest.tenant, blobs, clock.wall())
        address = manifest.program.address
        if address in absent:
            raise ConflictError(f"the program of {manifest.name!r}, {address}, is not in the repository: upload it")
        nbytes = self._repository.path(address).stat().st_size
        if nbytes > PROGRAM_BYTES_MAX:
            raise TooLargeError(f"the program of {manifest.name!r} has {nbytes} bytes; at most {PROGRAM_BYTES_MAX}")
        program = decode_program(self._repository.read(address))
        validate(program)
        if absent:
            # Blobs that arrive only before the registration would not be checked.
            raise absent_error(manifest.name, absent)
        check_weights(self._repository, manifest, program.weights)
        if manifest.handler is None and (manifest.inputs, manifest.outputs) != (program.inputs, program.outputs):
            raise CallerError(f"{manifest.name!r} has no handler, so its inputs and outputs must be its program's")
        _check_run(manifest)
        unnumbered = DeployedFunction(Deployment(manifest.name, 0, manifest, 0.0))
        unnumbered.on_trial = True
        placed = placement(manifest, program, self._config.scheduler.devices)
        _divide(unnumbered, program, placed)
        for part in unnumbered.parts():
            part.check_messages()
        return program, placed

    def _forget(self, deployment: Deployment) -> None:
        with suppress(NotFoundError):
            # Its tenant may have removed it meanwhile.
            self._repository.remove(deployment.name, deployment.version)

    def owner(self, name: FunctionName) -> TenantId:
        """Return the tenant of a function, also of one on trial; raise NotFoundError."""
        answering = [function_id(name, version) for version in self._versions_of(name).numbers[-1:]]
        for function in (*map(self._registry.functions.__getitem__, answering), *self._quotas.functions_on_trial):
            if function.deployment.name == name:
                return function.manifest.tenant
        raise no_function(name)

    async def remove(self, name: FunctionName, version: int | None) -> None:
        """Remove one version, or all with None. Runs in progress get the drain timeout to end. Raises NotFoundError, or
        ConflictError if a pipeline needs it, or if it has a share of the requests and other versions remain.
        """
        tenant = self.owner(name)
        async with self._pipelines.changing.turn(tenant):
            if self.owner(name) != tenant:
                raise NotFoundError(f"function {name!r} was removed")
            await self._protect(name, version)
            removed = await completed(self._remove(name, version))
        # The versions are removed. What this does not collect, the periodic collection will.
        with self._faults.contained("removing unneeded blocks"):
            await self._unneeded.collect(removed)

    async def _remove(self, name: FunctionName, version: int | None) -> set[Address]:
        """Remove versions; return the blobs that they needed."""
        tenant, blobs = self.owner(name), set[Address]()
        for gone in await asyncio.to_thread(self._repository.remove, name, version):
            # There may be thousands.
            await self._removal_queue.turn(tenant, 0)
            function = self._registry.remove(function_id(name, gone))
            if function is not None:
                blobs.update(blob.address for blob in function.manifest.blobs())
                self._removed(function)
        return blobs

    def _removed(self, function: DeployedFunction) -> None:
        """A version is removed; its parts on the pool are removed when its handler, if it has one, has no more runs."""
        *others, last = function.parts()
        self._parts_removed([last])
        if function.program is None:
            self._parts_removed(others)
        else:
            self._pool_calls.after_runs(function.id, partial(self._parts_removed, others))

    def _parts_removed(self, parts: Sequence[DeployedFunction]) -> None:
        for part in reversed(parts):
            self._registry.remove(part.id)
            self._quarantine.forget(part.id)
            self._post(Removed(part.id))

    async def _protect(self, name: FunctionName, gone: int | None) -> None:
        """Raise ConflictError if a version that is to be removed, or with None any version of the function, is needed
        by a pipeline, or has a share of the requests while others remain.
        """
        versions = self._versions_of(name)
        left = [version for version in versions.numbers if gone not in (None, version)]
        removed = set(versions.numbers) - set(left)
        if left:
            # The catalog would allow the removal until it has recorded that a remaining version passed its trial.
            check_removal(name, versions.shares, removed)
        default = self._registry.view(name, default_of(left, versions.shares)) if left else None
        await self._pipelines.protect(name, default, removed)

    def _restore_parts(self, function: DeployedFunction) -> str:
        """Divide a stored function as at its deploy, by the devices that the node has now. Return why that is
        impossible; empty: it is done.
        """
        devices, manifest = self._config.scheduler.devices, function.manifest
        is_cut = manifest.settings.device == "pool" and bool(devices) and not may_hold(manifest, devices)
        if not (function.handler_only or function.on_either or is_cut):
            return ""
        try:
            program = decode_program(self._repository.read(manifest.program.address))
        except (OverwinterError, OSError) as error:
            return f"its program cannot be read: {error}"
        placed = Placement()
        # If no slices fit, the scheduler refuses its requests.
        with suppress(NoSpaceError):
            placed = placement(manifest, program, devices) if is_cut or function.on_either else placed
        _divide(function, program, placed)
        return ""

    def restore(self) -> None:
        """Tell the scheduler about every function in the repository, and restore the pipelines. Entries that cannot be
        read are logged, and stay. In the host stores, keep only the blocks of functions whose blocks are all there and
        that fit together.
        """
        self._repository.forget_unproven()
        deployments = self._repository.deployments(self._log_skipped)
        deployed = [DeployedFunction(each, self._config.scheduler.memory_bytes) for each in deployments]
        faults = {function.id: fault for function in deployed if (fault := self._restore_parts(function))}
        functions = [part for function in deployed for part in function.parts()]
        self._hosts.sweep(blobs_by_store(functions))
        # A function that is partly present must be loaded as a whole, so keep only blocks that a complete function
        # needs.
        whole = [function for function in functions if self._registry.is_resident(function)]
        self._hosts.sweep(blobs_by_store(_fitting(whole, self._config.scheduler.host_bytes)))
        for function in functions:
            function.use_profile(self._profiler.stored(function))
            self._registry.add(function)
            function.undivided = function.id in faults
            quarantined = faults.get(function.id) or self._quarantine.reason(function.id)
            if quarantined:
                self._log_out_of_service(function, quarantined)
            resident = self._registry.is_resident(function)
            self._post(Deployed(function.spec(), resident=resident, quarantined=without_addresses(quarantined)))
        limited = {f"function {function.id}": function.deployment.limited for function in deployed}
        pipelines = self._pipelines.restore(self._log_skipped)
        limited |= {f"pipeline {name!r}": message for name, message in pipelines.items()}
        for what, every in limited.items():
            for message in every:
                self._log(f"{what}: {message}")

    def _log_out_of_service(self, function: DeployedFunction, why: str) -> None:
        """Log that a function, or a part of one, is out of service. Users know and load only whole functions."""
        whole = whole_id(function.id)
        what = f"a part of function {whole} on the pool" if is_part(function.id) else f"function {whole}"
        until = "deployed again, or the node is restarted" if function.undivided else "loaded"
        self._log(f"{what} is out of service until {whole} is {until}: {why}", function=whole)

    def _log_skipped(self, error: StoreError) -> None:
        self._log(f"not served: {error}", level="error")


def _fitting(functions: Sequence[DeployedFunction], host_bytes: int | None) -> list[DeployedFunction]:
    """Return those of these functions whose blocks fit together into so much memory, pinned ones first."""
    fitting, held, taken = [], set[tuple[StoreName, Address]](), 0
    for function in sorted(functions, key=lambda each: not each.manifest.settings.pinned):
        sizes = {(function.store, blob.address): page_bytes(blob.nbytes) for blob in function.blobs}
        added = sum(nbytes for key, nbytes in sizes.items() if key not in held)
        if host_bytes is None or taken + added <= host_bytes:
            fitting.append(function)
            held |= sizes.keys()
            taken += added
    return fitting


def _check_run(manifest: Manifest) -> None:
    """Raise CallerError if a run of the function might have too many tensors, or sizes in their shapes."""
    specs, batch = [*manifest.inputs, *manifest.outputs], manifest.settings.max_batch
    if batch > (most := requests_of_run_max(specs)):
        sizes = sum(len(spec.shape) for spec in specs)
        raise CallerError(
            f"{manifest.name!r} has {len(specs)} inputs and outputs with {sizes} sizes in their shapes, too many for a "
            f"run of {batch} requests: lower max_batch to {most}"
        )


def _divide(function: DeployedFunction, program: Program, placed: Placement) -> None:
    """Turn its program into separate functions: one on the pool if the function itself runs in workers and its program
    may run on the pool, and one for each slice but the first if the program is cut.
    """
    function.device_warning = placed.why_not
    if function.handler_only or (function.on_either and not placed.why_not):
        function.split(program)
    if placed.slices:
        function.cut(placed.slices)

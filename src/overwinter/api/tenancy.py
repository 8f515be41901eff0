"""One tenant's view of a node: its own functions, under its own names.

A node with tokens gives each tenant its own namespace: `resnet` of `acme` is `acme..resnet` in the node. So two tenants
may use the same name without learning of it. Only this module converts between a tenant's names and the node's.
Functions that were deployed before the first token keep their names. Route handlers get this view in place of the node:
functions of other tenants do not exist in it, except in the telemetry for an administrator.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import msgspec

from overwinter.api.node_interface import Blocks, Deployed, DeployResult, FunctionView, NodeInterface, Telemetry, Upload
from overwinter.api.tenant_telemetry import TenantTelemetry
from overwinter.core.call import Call, Result
from overwinter.core.errors import CallerError, NotFoundError, OverwinterError, no_function
from overwinter.core.function import Availability
from overwinter.core.ids import NAME_MAX, Address, FunctionName, TenantId
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileOptions, Progress
from overwinter.core.tensor import TensorSpec
from overwinter.core.versions import Shares
from overwinter.node.views import DeployedVersion
from overwinter.store.manifest import Manifest
from overwinter.store.tokens import SEPARATOR, Quota

ESCAPED_BACKSLASH = b"\\\\"

_encode = msgspec.json.Encoder().encode


class TenantNames:
    """Conversion between the names of one tenant and those of the node."""

    def __init__(self, tenant: TenantId) -> None:
        self.prefix = f"{tenant}{SEPARATOR}"
        # Match whole words only, and only before a name: a sentence may end in the prefix. Each pattern begins with the
        # literal prefix and has its lookbehind behind it: `re` finds a literal many times faster than a lookbehind.
        prefix = re.escape(self.prefix)
        self._in_text = re.compile(rf"{prefix}(?=[A-Za-z0-9])(?<![a-z0-9._-]{prefix})")
        # The letter of a JSON escape, such as the `n` of `\n`, belongs to no word.
        behind_escape = rf"(?<=\\[bfnrt]{prefix})|(?<=\\u[0-9a-f]{{4}}{prefix})"
        self._escaped = re.compile(rf"{prefix}(?=[A-Za-z0-9])(?:(?<![\\a-z0-9._-]{prefix})|{behind_escape})".encode())

    def in_node(self, name: FunctionName) -> FunctionName:
        """Return the node's name of the tenant's function."""
        return FunctionName(self.prefix + name)

    def translated(self, text: str) -> str:
        """Convert the node's names in a text to the tenant's."""
        return self._in_text.sub("", text)

    def translated_json(self, value: object) -> msgspec.Raw:
        """Convert the node's answer to JSON with the tenant's names."""
        return msgspec.Raw(self.translated_bytes(_encode(value)))

    def translated_bytes(self, text: bytes) -> bytes:
        """Convert the node's names in a text with escapes (JSON, metrics) to the tenant's."""
        # A zero byte, which no such text contains, stands for an escaped backslash. Each other backslash begins an
        # escape.
        text = self._escaped.sub(b"", text.replace(ESCAPED_BACKSLASH, b"\0"))
        return text.replace(b"\0", ESCAPED_BACKSLASH)


class _View:
    """A function of the tenant, under the name that the tenant uses."""

    __slots__ = ("_names", "_view", "name")

    def __init__(self, name: FunctionName, view: FunctionView, names: TenantNames) -> None:
        self.name = name
        self._view = view
        self._names = names

    @property
    def tenant(self) -> TenantId:
        """The tenant that owns it."""
        return self._view.tenant

    @property
    def version(self) -> int:
        """The version of the function."""
        return self._view.version

    @property
    def state(self) -> Availability:
        """Whether it answers requests."""
        return self._view.state

    @property
    def reason(self) -> str:
        """Why it is not READY."""
        return self._names.translated(self._view.reason)

    @property
    def platform(self) -> str:
        """The kind of model."""
        return self._view.platform

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Its inputs."""
        return self._view.inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Its outputs."""
        return self._view.outputs

    @property
    def settings(self) -> msgspec.Struct:
        """Its settings."""
        return self._view.settings

    def info(self, whole: bool = False, /) -> object:
        """Its description, under the tenant's names."""
        return self._names.translated_json(self._view.info(whole))


class _QuotaBlocks:
    """The repository with a limit on the bytes of a tenant."""

    def __init__(self, blocks: Blocks, nbytes: int | None) -> None:
        self._blocks = blocks
        self._nbytes = nbytes

    def missing(self, tenant: TenantId, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        """Return the addresses of blocks that the tenant must send."""
        return self._blocks.missing(tenant, addresses, now)

    def upload(self, tenant: TenantId, address: Address, tenant_bytes: int | None = None) -> Upload:
        """Begin to store one block; the quota replaces `tenant_bytes`."""
        return self._blocks.upload(tenant, address, self._nbytes)


class TenantNode:
    """The node as one tenant sees it."""

    def __init__(self, node: NodeInterface, tenant: TenantId, quota: Quota, *, is_admin: bool = False) -> None:
        """`is_admin`: metrics, usage, activity and devices are those of the whole node and all tenants."""
        self._node = node
        self._tenant = tenant
        self._quota = quota
        self._is_admin = is_admin
        self.names = TenantNames(tenant)
        self.repository: Blocks = _QuotaBlocks(node.repository, quota.nbytes)

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry of the tenant's functions; for an administrator, of the whole node."""
        return TenantTelemetry(self._node, self._tenant, self.names, self._node_name, self._is_admin)

    def live(self) -> bool:
        """Whether the node's scheduler works."""
        return self._node.live()

    def ready(self) -> bool:
        """Whether the node can start workers."""
        return self._node.ready()

    # Queries

    def functions(self, tenant: TenantId | None = None) -> Iterator[FunctionView]:
        """Yield every version of every function of the tenant."""
        if tenant not in (None, self._tenant):
            return iter(())
        # The node filters: otherwise each step of a listing would skip over thousands of functions of other tenants.
        return (self._view_of(view) for view in self._node.functions(self._tenant))

    def pipelines(self, tenant: TenantId | None = None) -> Iterator[FunctionView]:
        """Every pipeline of the tenant."""
        if tenant not in (None, self._tenant):
            return iter(())
        return (self._view_of(view) for view in self._node.pipelines(self._tenant))

    def versions(self, name: FunctionName) -> Sequence[int]:
        """Return the versions that passed their trial."""
        try:
            return self._node.versions(self._find(name, None).name)
        except NotFoundError:
            return ()

    def owner(self, name: FunctionName) -> TenantId:
        """Return the tenant; raise NotFoundError."""
        self._node_name(name)
        return self._tenant

    def view(self, name: FunctionName, version: int | None) -> FunctionView:
        """Return one version of a function, or a pipeline; raise NotFoundError."""
        return _View(name, self._find(name, version), self.names)

    # Actions

    async def infer(self, call: Call) -> Result:
        """Run a function or a pipeline of the tenant."""
        node_name = self._find(call.name, call.version).name
        result = await self._node.infer(msgspec.structs.replace(call, name=node_name))
        return Result(call.name, result.version, result.outputs, result.start)

    async def deploy(self, manifest: Manifest, functions_max: int | None = None) -> DeployResult:
        """Register a new version of a function of the tenant."""
        node_name = self._name_to_deploy(manifest.name)
        renamed = msgspec.structs.replace(manifest, name=node_name, tenant=self._tenant)
        deployed = await self._node.deploy(renamed, self._quota.functions)
        return DeployedVersion(manifest.name, deployed.version, self.names.translated(deployed.warning))

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId) -> Deployed:
        """Register functions of the tenant to be called as one."""
        stages = {
            key: msgspec.structs.replace(stage, function=self._node_name_or_new(stage.function))
            for key, stage in pipeline.stages.items()
        }
        renamed = msgspec.structs.replace(pipeline, name=self._name_to_deploy(pipeline.name), stages=stages)
        return await self._node.deploy_pipeline(renamed, self._tenant)

    async def profile(
        self, name: FunctionName, version: int | None, options: ProfileOptions, report: Callable[[Progress], None]
    ) -> Profile:
        """Measure a function of the tenant."""

        def report_translated(progress: Progress) -> None:
            report(msgspec.structs.replace(progress, what=self.names.translated(progress.what)))

        try:
            return await self._node.profile(self._node_name(name), version, options, report_translated)
        except OverwinterError as error:
            # Progress and errors are written into an answer that has already begun.
            self._raise_translated(error)

    async def known_profile(self, name: FunctionName, version: int | None) -> Profile:
        """Return the profile of a function."""
        return await self._node.known_profile(self._node_name(name), version)

    async def set_traffic(self, name: FunctionName, shares: Shares) -> None:
        """Set the versions that get the requests without a version."""
        await self._node.set_traffic(self._node_name(name), shares)

    async def remove(self, name: FunctionName, version: int | None) -> None:
        """Remove one version of a function, or all, or a pipeline."""
        await self._node.remove(self._node_name(name), version)

    async def load(self, name: FunctionName, version: int | None) -> None:
        """Wake a function."""
        await self._node.load(self._node_name(name), version)

    async def unload(self, name: FunctionName, version: int | None) -> None:
        """Unload a function, which releases its memory."""
        await self._node.unload(self._node_name(name), version)

    # Names

    def _find(self, name: FunctionName, version: int | None) -> FunctionView:
        """Return a function of the tenant. It is called for each request, and usually takes two look-ups."""
        own = self.names.in_node(name)
        if not self._node.versions(own) and (view := self._view_without_prefix(name, version)) is not None:
            return view
        view = self._node.view(own, version)
        if view.tenant != self._tenant:
            raise no_function(name)
        return view

    def _view_without_prefix(self, name: FunctionName, version: int | None) -> FunctionView | None:
        """Return a function that the tenant deployed before the first token; None also if it belongs to another
        tenant.
        """
        try:
            view = self._node.view(name, version)
        except NotFoundError:
            return None
        return view if view.tenant == self._tenant else None

    def _node_name(self, name: FunctionName) -> FunctionName:
        """Return the node's name of a function of the tenant, also during its trial; raise NotFoundError."""
        own = self.names.in_node(name)
        try:
            if self._node.owner(own) == self._tenant:
                return own
        except NotFoundError:
            return self._name_without_prefix(name)
        raise no_function(name)

    def _name_without_prefix(self, name: FunctionName) -> FunctionName:
        """Return the name of a function that the tenant deployed before the first token.

        NotFoundError has the same text for an unknown name and for another tenant's.
        """
        try:
            if self._node.owner(name) == self._tenant:
                return name
        except NotFoundError:
            pass
        raise no_function(name)

    def _node_name_or_new(self, name: FunctionName) -> FunctionName:
        try:
            return self._node_name(name)
        except NotFoundError:
            return self.names.in_node(name)

    def _name_to_deploy(self, name: FunctionName) -> FunctionName:
        """Return the node's name for a function or pipeline to deploy; raise CallerError if it is too long."""
        node_name = self._node_name_or_new(name)
        if len(node_name) > NAME_MAX:
            most = NAME_MAX - len(self.names.prefix)
            raise CallerError(
                f"the name {name[:80]!r} is too long: names of tenant {self._tenant!r} have at most {most} characters"
            )
        return node_name

    def _view_of(self, view: FunctionView) -> FunctionView:
        return _View(FunctionName(view.name.removeprefix(self.names.prefix)), view, self.names)

    def _raise_translated(self, error: OverwinterError) -> NoReturn:
        raise type(error)(self.names.translated(str(error)), error.retry_after_s, error.totals) from error

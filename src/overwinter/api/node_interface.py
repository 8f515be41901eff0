"""The interface of a node that the API uses.

`node.Node` implements it, and so do `tenancy.TenantNode`, the node as one tenant sees it, and a fake node of the tests.
Attributes are read-only properties, so that frozen structs of any package implement them.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from overwinter.core.call import Call, Result
from overwinter.core.function import Availability
from overwinter.core.ids import Address, FunctionName, TenantId
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileOptions, Progress
from overwinter.core.tensor import Buffer, TensorSpec
from overwinter.core.versions import Shares
from overwinter.store.manifest import Manifest


class FunctionView(Protocol):
    """One deployed version of a function, or a pipeline, as callers see it."""

    @property
    def name(self) -> FunctionName:
        """The name of the function or pipeline."""
        ...

    @property
    def tenant(self) -> TenantId:
        """The tenant that owns it."""
        ...

    @property
    def version(self) -> int:
        """The version, from 1."""
        ...

    @property
    def state(self) -> Availability:
        """READY: it answers requests, also while it has no worker. LOADING: it is on trial."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        ...

    @property
    def platform(self) -> str:
        """`overwinter_program` or `overwinter_pipeline`."""
        ...

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Its inputs, in order; raises CallerError if those of a pipeline are unknown."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Its outputs, in order; raises CallerError if those of a pipeline are unknown."""
        ...

    @property
    def settings(self) -> msgspec.Struct:
        """Its settings, or those of the pipeline."""
        ...

    def info(self, whole: bool = False, /) -> object:
        """Return its description, as data for JSON; this is slow. `whole`: with the details that only a query for one
        function returns.
        """
        ...


class Deployed(Protocol):
    """The result of a deploy."""

    @property
    def version(self) -> int:
        """The version, from 1."""
        ...


class DeployResult(Deployed, Protocol):
    """The result of a deploy of a function."""

    @property
    def warning(self) -> str:
        """The warnings of its trial; empty: none."""
        ...


class Upload(Protocol):
    """An upload of a block. Its methods access the disk and are called in a thread."""

    def __enter__(self) -> Self:
        """Return the upload."""
        ...

    def write(self, chunk: Buffer, /) -> None:
        """Append some bytes; raise NoSpaceError when the disk is full, or the tenant is at its limit."""
        ...

    def commit(self, now: float, /) -> bool:
        """Store the block; return whether it is new to the tenant. Raises CallerError when the bytes do not match
        the address. `now` is in seconds since 1970.
        """
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None:
        """Discard an uncommitted upload."""
        ...


class Blocks(Protocol):
    """The storage of uploaded blocks. Both methods access the disk and are called in a thread."""

    def missing(self, tenant: TenantId, addresses: Sequence[Address], now: float, /) -> Sequence[Address]:
        """Return those of `addresses` that the tenant must send. For the others, the time for which blocks are kept
        although no function needs them begins again at `now` (seconds since 1970).
        """
        ...

    def upload(self, tenant: TenantId, address: Address, tenant_bytes: int | None = None, /) -> Upload:
        """Begin to store one block. `tenant_bytes`: the most bytes that the tenant may store in total, if fewer than
        the node allows.
        """
        ...


class Telemetry(Protocol):
    """The telemetry of a node. The API sends the metrics as they are, and all other results as JSON."""

    async def metrics(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        ...

    async def usage(self, tenant: TenantId | None, /) -> Sequence[object]:
        """The usage of each function, of all tenants or of one."""
        ...

    async def activity(self) -> object:
        """The current activity."""
        ...

    async def devices(self) -> object:
        """The devices of the pool."""
        ...

    async def explain(self, name: FunctionName, version: int | None, /) -> object:
        """The explanation of a function; raises NotFoundError for an unknown one."""
        ...

    async def logs(self, name: FunctionName, version: int | None, /) -> object:
        """The last output of a function's code; raises NotFoundError for an unknown one."""
        ...


class NodeInterface(Protocol):
    """The node, as the API uses it. A method that fails raises an OverwinterError."""

    @property
    def repository(self) -> Blocks:
        """The storage of uploaded blocks."""
        ...

    def live(self) -> bool:
        """Whether the scheduler works; False once it has failed."""
        ...

    def ready(self) -> bool:
        """Whether the node is live and can start workers."""
        ...

    def functions(self, tenant: TenantId | None = None, /) -> Iterable[FunctionView]:
        """Return every version of every function, of all tenants or of one. Each has the state of the moment at which
        the iteration comes to it, because there may be thousands.
        """
        ...

    def pipelines(self, tenant: TenantId | None = None, /) -> Iterable[FunctionView]:
        """Return every pipeline, of all tenants or of one, in the same way."""
        ...

    def versions(self, name: FunctionName, /) -> Sequence[int]:
        """Return the versions of a function that passed their trial, ascending, or the version of a pipeline; empty for
        an unknown name.
        """
        ...

    def owner(self, name: FunctionName, /) -> TenantId:
        """Return the tenant of a function or a pipeline; raise NotFoundError for an unknown name."""
        ...

    def view(self, name: FunctionName, version: int | None, /) -> FunctionView:
        """Return a version of a function, with None the default one, or a pipeline; raise NotFoundError if there is
        none. It is called for every request, so it must be fast.
        """
        ...

    def infer(self, call: Call, /) -> Awaitable[Result]:
        """Run a function or a pipeline. The node does not change the outputs after it has returned them."""
        ...

    async def deploy(self, manifest: Manifest, functions_max: int | None = None, /) -> DeployResult:
        """Register a new version, whose blocks must be stored, and try it; raise the error of its trial.
        `functions_max`: the most versions of functions that its tenant may have, if fewer than the node allows.
        """
        ...

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId, /) -> Deployed:
        """Register a pipeline of a tenant's functions. It replaces the pipeline of that name, if there is one."""
        ...

    async def profile(
        self, name: FunctionName, version: int | None, options: ProfileOptions, report: Callable[[Progress], None], /
    ) -> Profile:
        """Measure configurations of a function on this machine, and skip known ones unless `options.again`. `report`
        receives the progress.
        """
        ...

    async def known_profile(self, name: FunctionName, version: int | None, /) -> Profile:
        """Return the profile of a function on this machine; raise NotFoundError if there is none."""
        ...

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry of the node."""
        ...

    async def set_traffic(self, name: FunctionName, shares: Shares, /) -> None:
        """Divide the requests that name no version among versions; with no shares, the newest version gets all."""
        ...

    async def remove(self, name: FunctionName, version: int | None, /) -> None:
        """Remove a version of a function, with None all versions, or a pipeline."""
        ...

    async def load(self, name: FunctionName, version: int | None, /) -> None:
        """Wake a function, or all functions of a pipeline, also if it was unloaded."""
        ...

    async def unload(self, name: FunctionName, version: int | None, /) -> None:
        """Unload a version of a function, with None all versions: it releases its memory and answers no requests until
        it is loaded.
        """
        ...

"""The interface that the API needs from a node.

The node is one implementation; the tests have another. Attributes are read-only properties, so that frozen structs of
any package implement them.
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
from overwinter.core.profiling import Progress, Wanted
from overwinter.core.tensor import Buffer, TensorSpec
from overwinter.core.versions import Shares
from overwinter.store.manifest import Manifest


class FunctionView(Protocol):
    """One deployed version of a function, or a pipeline, as callers see it.

    Deployers receive it as JSON, so it is a struct with these fields and possibly further ones.
    """

    @property
    def name(self) -> FunctionName:
        """The function."""
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
        """READY: a request would be answered, even if the function is asleep."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        ...

    @property
    def platform(self) -> str:
        """The kind of model: overwinter_program, overwinter_pipeline."""
        ...

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Its inputs, in order."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Its outputs, in order."""
        ...

    @property
    def settings(self) -> msgspec.Struct:
        """Its settings: Settings for a function."""
        ...

    def info(self, whole: bool = False, /) -> object:
        """Its full description, as data for JSON; `whole`: with the details that only a query for one function returns.
        Expensive.
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
        """Warnings of its trial; empty: none."""
        ...


class Upload(Protocol):
    """An upload of a block. Its methods access the disk and are called in a thread."""

    def __enter__(self) -> Self:
        """Enter the context."""
        ...

    def write(self, chunk: Buffer, /) -> None:
        """Append some bytes."""
        ...

    def commit(self, now: float, /) -> bool:
        """Commit the block; False when the tenant had sent it before. Raises CallerError when the bytes do not match
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
        """Return those of `addresses` that the tenant has not sent yet."""
        ...

    def upload(self, tenant: TenantId, address: Address, most_bytes: int | None = None, /) -> Upload:
        """Begin to store one block of a tenant, which may store at most `most_bytes`."""
        ...


class Telemetry(Protocol):
    """The telemetry of a node. Its results are sent as JSON unchanged."""

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
        """The explanation of a function; raises NotFoundError if there is none."""
        ...

    async def logs(self, name: FunctionName, version: int | None, /) -> object:
        """The last output of a function's code; raises NotFoundError if there is none."""
        ...


class Front(Protocol):
    """The node, as the API uses it. All methods raise OverwinterError."""

    @property
    def repository(self) -> Blocks:
        """The storage for uploaded blocks."""
        ...

    def live(self) -> bool:
        """Whether the node's event loop is running."""
        ...

    def ready(self) -> bool:
        """Whether requests are answered."""
        ...

    def functions(self, tenant: TenantId | None = None, /) -> Iterable[FunctionView]:
        """Return every version of every function, of all tenants or of one, each as it is when it is read, because
        there may be thousands.
        """
        ...

    def pipelines(self, tenant: TenantId | None = None, /) -> Iterable[FunctionView]:
        """Every pipeline, of all tenants or of one, each as it is when it is read."""
        ...

    def versions(self, name: FunctionName, /) -> Sequence[int]:
        """Return the available versions of a function or pipeline, ascending; empty for an unknown name."""
        ...

    def owner(self, name: FunctionName, /) -> TenantId:
        """Return the tenant of a function or a pipeline; raise NotFoundError."""
        ...

    def view(self, name: FunctionName, version: int | None, /) -> FunctionView:
        """Return one version of a function, or its default version, or a pipeline; raise NotFoundError. Called for
        every request, so it must be cheap.
        """
        ...

    def infer(self, call: Call, /) -> Awaitable[Result]:
        """Run a function or a pipeline. The outputs must not change after it returns."""
        ...

    async def deploy(self, manifest: Manifest, functions_max: int | None = None, /) -> DeployResult:
        """Register a new version whose blocks are all stored; its tenant may have at most `functions_max` functions."""
        ...

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId, /) -> Deployed:
        """Register a pipeline of a tenant's functions; it replaces a pipeline of that name."""
        ...

    async def profile(
        self, name: FunctionName, version: int | None, wanted: Wanted, report: Callable[[Progress], None], /
    ) -> Profile:
        """Measure the unknown configurations of a function on this machine; `report` receives the progress."""
        ...

    def known_profile(self, name: FunctionName, version: int | None, /) -> Profile:
        """Return the profile of a function on this machine; raise NotFoundError if there is none."""
        ...

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry of the node."""
        ...

    async def set_traffic(self, name: FunctionName, shares: Shares, /) -> None:
        """Set the versions that get the requests without a version; with no shares, the newest gets all."""
        ...

    async def remove(self, name: FunctionName, version: int | None, /) -> None:
        """Remove one version of a function, or all, or a pipeline."""
        ...

    async def load(self, name: FunctionName, version: int | None, /) -> None:
        """Wake a function, and make it available again."""
        ...

    async def unload(self, name: FunctionName, version: int | None, /) -> None:
        """Unload a function: it releases its memory and answers no requests until it is loaded."""
        ...

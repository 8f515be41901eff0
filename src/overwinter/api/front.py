"""What does the front door need from the node behind it?

The node is one implementation; the tests bring another. Attributes are read-only properties so that frozen
structs, whatever room they live in, fit as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec

from overwinter.core.ids import Address, FunctionName, TenantId
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile
from overwinter.core.profiling import Progress, Wanted
from overwinter.core.tensor import Buffer, Tensor, TensorSpec
from overwinter.core.versions import Shares
from overwinter.store.manifest import Manifest

State = Literal["READY", "UNAVAILABLE", "LOADING"]
Start = Literal["warm", "bound", "host", "disk"]


class FunctionView(Protocol):
    """One deployed version of a function, or a pipeline, as callers see it.

    It goes to deployers as JSON just as it is: a struct with these fields, and any others that are worth showing.
    """

    @property
    def name(self) -> FunctionName:
        """The function."""
        ...

    @property
    def tenant(self) -> TenantId:
        """Whose it is."""
        ...

    @property
    def version(self) -> int:
        """Which version of it; from 1."""
        ...

    @property
    def state(self) -> State:
        """READY: a request would be answered, even if the function sleeps now."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        ...

    @property
    def platform(self) -> str:
        """What runs it: overwinter_program, overwinter_pipeline."""
        ...

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What it takes, in order."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """What it gives, in order."""
        ...

    @property
    def settings(self) -> msgspec.Struct:
        """What its owner chose: Settings for a function."""
        ...

    def info(self, whole: bool = False, /) -> object:
        """All that can be told of it, as data for JSON; `whole`: what is told of one at a time, too. Not cheap."""
        ...


class Reply(Protocol):
    """A function's answer."""

    @property
    def name(self) -> FunctionName:
        """The function."""
        ...

    @property
    def version(self) -> int:
        """Which version of it; from 1."""
        ...

    @property
    def outputs(self) -> Sequence[Tensor]:
        """All outputs of the function, in the order of its specs."""
        ...

    @property
    def start(self) -> Start:
        """Where the weights lay when the request came: in a live worker, in the host store, on disk."""
        ...


class Deployed(Protocol):
    """What a deploy made."""

    @property
    def version(self) -> int:
        """Which version of it; from 1."""
        ...


class Tried(Deployed, Protocol):
    """What a deploy of a function made."""

    @property
    def warning(self) -> str:
        """What its author should know of its trial; empty: nothing."""
        ...


class Upload(Protocol):
    """A block on its way in. What it does touches the disk and is called in a thread."""

    def __enter__(self) -> Self:
        """Nothing is done."""
        ...

    def write(self, chunk: Buffer, /) -> None:
        """Append some bytes."""
        ...

    def commit(self, now: float, /) -> bool:
        """Put it in its place; False when the tenant had sent it. CallerError when the bytes do not give the address.
        `now` is in seconds since 1970.
        """
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None:
        """Leave nothing behind that is not committed."""
        ...


class Blocks(Protocol):
    """Where uploaded blocks go. Both methods touch the disk and are called in a thread."""

    def missing(self, tenant: TenantId, addresses: Sequence[Address], now: float, /) -> Sequence[Address]:
        """Those of `addresses` that the tenant has not sent yet."""
        ...

    def upload(self, tenant: TenantId, address: Address, most_bytes: int | None = None, /) -> Upload:
        """Begin to store one block that a tenant sends, which may hold `most_bytes`, if not fewer."""
        ...


class Telemetry(Protocol):
    """What people can see of a node. What it returns goes out as JSON just as it is."""

    async def metrics(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        ...

    async def usage(self, tenant: TenantId | None, /) -> object:
        """What each function used, of all tenants or of one."""
        ...

    async def activity(self) -> object:
        """What goes on just now."""
        ...

    async def explain(self, name: FunctionName, version: int | None, /) -> object:
        """Why a function is as it is; NotFoundError."""
        ...

    async def logs(self, name: FunctionName, version: int | None, /) -> object:
        """What the code of a function printed of late; NotFoundError."""
        ...


class Front(Protocol):
    """The node, seen from the front door. All methods raise core errors."""

    @property
    def repository(self) -> Blocks:
        """Where uploaded blocks go."""
        ...

    def live(self) -> bool:
        """Whether the node's loop still works."""
        ...

    def ready(self) -> bool:
        """Whether requests are answered."""
        ...

    def functions(self, tenant: TenantId | None = None, /) -> Iterable[FunctionView]:
        """Every version of every function, of all tenants or of one, each as it is when its turn comes: there may be
        thousands.
        """
        ...

    def pipelines(self) -> Iterable[FunctionView]:
        """Every pipeline."""
        ...

    def versions(self, name: FunctionName, /) -> Sequence[int]:
        """Those of a function or a pipeline that answer, ascending; none of a name that nobody knows."""
        ...

    def owner(self, name: FunctionName, /) -> TenantId:
        """Whose a function or a pipeline is; NotFoundError."""
        ...

    def view(self, name: FunctionName, version: int | None, /) -> FunctionView:
        """One version of a function, or its default, or a pipeline; NotFoundError. Called for every request: it must
        be cheap.
        """
        ...

    async def infer(
        self,
        name: FunctionName,
        version: int | None,
        inputs: list[Tensor],
        timeout_s: float | None,
        priority: int,
        /,
    ) -> Reply:
        """Run a function or a pipeline; the inputs fit its specs. The outputs may not change after it returns."""
        ...

    async def deploy(self, manifest: Manifest, functions_max: int | None = None, /) -> Tried:
        """Register a new version whose blocks are all stored; its tenant may have `functions_max`, if not fewer."""
        ...

    async def deploy_pipeline(self, pipeline: Pipeline, tenant: TenantId, /) -> Deployed:
        """Register a tenant's functions to be called as one, in place of a pipeline of that name."""
        ...

    async def profile(
        self, name: FunctionName, version: int | None, wanted: Wanted, tell: Callable[[Progress], None], /
    ) -> Profile:
        """Measure a function on this machine as far as that is not known; `tell` hears how far it is."""
        ...

    def known_profile(self, name: FunctionName, version: int | None, /) -> Profile:
        """What is known of a function's speed on this machine; NotFoundError also when nothing is."""
        ...

    @property
    def telemetry(self) -> Telemetry:
        """What people can see of it."""
        ...

    async def set_traffic(self, name: FunctionName, shares: Shares, /) -> None:
        """Say which versions of a function get the requests that name none; with no shares, the newest."""
        ...

    async def remove(self, name: FunctionName, version: int | None, /) -> None:
        """Take away one version of a function, or all, or a pipeline."""
        ...

    async def load(self, name: FunctionName, version: int | None, /) -> None:
        """Wake a function, and make it available again."""
        ...

    async def unload(self, name: FunctionName, version: int | None, /) -> None:
        """Make a function give back its memory and answer no more until it is loaded."""
        ...

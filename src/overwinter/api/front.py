"""What does the front door need from the node behind it?

The node is one implementation; the tests bring another. Attributes are read-only properties so that frozen
structs, whatever room they live in, fit as they are.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from overwinter.core.function import Settings
from overwinter.core.ids import Address, FunctionName
from overwinter.core.tensor import Tensor, TensorSpec
from overwinter.store.manifest import Manifest

State = Literal["READY", "UNAVAILABLE", "LOADING"]
Start = Literal["warm", "host", "disk"]


class FunctionView(Protocol):
    """One deployed version of a function, as callers see it.

    It goes to deployers as JSON just as it is: a struct with these fields, and any others that are worth showing.
    """

    @property
    def name(self) -> FunctionName:
        """The function."""
        ...

    @property
    def version(self) -> int:
        """Which version of it; from 1."""
        ...

    @property
    def latest(self) -> bool:
        """Whether a call without a version goes to this one."""
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
        """What runs it: overwinter_program."""
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
    def settings(self) -> Settings:
        """What its owner chose."""
        ...

    def info(self) -> object:
        """All that can be told of it, as data for JSON. Not cheap."""
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
        """Where the weights lay when the request came: in a live body, in the host store, on disk."""
        ...


class Deployed(Protocol):
    """What a deploy made."""

    @property
    def version(self) -> int:
        """Which version of it; from 1."""
        ...


class Blocks(Protocol):
    """Where uploaded blocks go. Both methods touch the disk and are called in a thread."""

    def missing(self, addresses: Sequence[Address], /) -> Sequence[Address]:
        """Those of `addresses` that are not stored yet."""
        ...

    def put(self, address: Address, data: Iterable[bytes], /) -> bool:
        """Store one block; False when it was there. CallerError when the bytes do not give the address."""
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

    def functions(self) -> Sequence[FunctionView]:
        """Every version of every function."""
        ...

    def function(self, name: FunctionName, version: int | None, /) -> FunctionView:
        """One version, or the latest; NotFoundError. Called for every request: it must be cheap."""
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
        """Run a function; the inputs fit its specs. The outputs may not change after it returns."""
        ...

    async def deploy(self, manifest: Manifest, /) -> Deployed:
        """Register a new version whose blocks are all stored."""
        ...

    async def remove(self, name: FunctionName, version: int | None, /) -> None:
        """Take away one version, or all."""
        ...

    async def load(self, name: FunctionName, version: int | None, /) -> None:
        """Wake a function, and make it available again."""
        ...

    async def unload(self, name: FunctionName, version: int | None, /) -> None:
        """Make a function give back its memory and answer no more until it is loaded."""
        ...

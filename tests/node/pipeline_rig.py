"""Functions in plain Python, and a pipeline of them."""

import asyncio
import struct
from collections.abc import Awaitable, Callable

import msgspec

from overwinter.core.call import Call, Result
from overwinter.core.errors import NotFoundError
from overwinter.core.function import Settings
from overwinter.core.pipeline import Pipeline, Stage
from overwinter.core.tensor import Tensor, TensorSpec


def floats(name: str, *values: float) -> Tensor:
    return Tensor(name, "FP32", (len(values),), struct.pack(f"<{len(values)}f", *values))


def values(tensor: Tensor) -> list[float]:
    return list(struct.unpack(f"<{tensor.shape[0]}f", tensor.data))


class View(msgspec.Struct):
    version: int
    tenant: str = "tests"
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", ("n",)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "FP32", ("n",)),)
    state: str = "READY"
    reason: str = ""
    settings: Settings = Settings()


Work = Callable[[list[Tensor]], Awaitable[list[Tensor]]]


class FakeFunctions:
    """Functions by name and version, and a clock that moves only explicitly."""

    def __init__(self) -> None:
        self.views: dict[tuple[str, int], View] = {}
        self.work: dict[str, Work] = {}
        self.asked: list[tuple[str, int | None, float | None, int]] = []
        self.cancelled: list[str] = []
        self.starts: dict[str, str] = {}
        self.time = 100.0

    def add(self, name: str, factor: float = 1.0, version: int = 1, work: Work | None = None, **view) -> None:
        async def scale(inputs: list[Tensor]) -> list[Tensor]:
            return [floats("y", *(factor * value for value in values(inputs[0])))]

        self.views[name, version] = View(version, **view)
        self.work[name] = work or scale

    def view(self, name: str, version: int | None) -> View:
        known = [key[1] for key in self.views if key[0] == name]
        asked = max(known, default=0) if version is None else version
        if asked not in known:
            raise NotFoundError(f"no function {name!r} here")
        return self.views[name, asked]

    async def infer(self, call: Call) -> Result:
        self.asked.append((call.name, call.version, call.timeout_s, call.priority))
        try:
            outputs = await self.work[call.name](call.inputs)
            if call.reserve is not None:
                call.reserve(sum(len(tensor.data) for tensor in outputs))
        except asyncio.CancelledError:
            self.cancelled.append(call.name)
            raise
        return Result(call.name, 1, outputs, self.starts.get(call.name, "warm"))

    def names(self) -> list[str]:
        return [asked[0] for asked in self.asked]


def scaling_functions() -> FakeFunctions:
    """Return three functions that multiply their input by 2, 3 and -1."""
    functions = FakeFunctions()
    for name, factor in (("double", 2.0), ("triple", 3.0), ("negate", -1.0)):
        functions.add(name, factor)
    return functions


FORK = Pipeline(
    name="fork",
    inputs=("x",),
    stages={
        "first": Stage(function="double", inputs={"x": "input:x"}),
        "left": Stage(function="triple", inputs={"x": "first:y"}),
        "right": Stage(function="negate", version=1, inputs={"x": "first:y"}),
    },
    outputs={"l": "left:y", "r": "right:y", "raw": "first:y"},
    timeout_s=10.0,
)

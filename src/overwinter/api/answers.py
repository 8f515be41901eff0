"""The JSON messages of answers: of the Open Inference Protocol, of the routes for deployers, and errors."""

from typing import Annotated

import msgspec

from overwinter.core.function import Availability
from overwinter.core.ids import Address, FunctionName


class Error(msgspec.Struct, frozen=True):
    """The reason why a request failed."""

    error: str


class ServerMetadata(msgspec.Struct, frozen=True):
    """What this server is."""

    name: str
    version: str
    extensions: tuple[str, ...]


class Live(msgspec.Struct, frozen=True):
    """Whether the node works."""

    live: bool


class Ready(msgspec.Struct, frozen=True):
    """Whether the node answers requests."""

    ready: bool


class Models(msgspec.Struct, frozen=True):
    """The names of all functions and pipelines."""

    models: tuple[FunctionName, ...]


Dims = Annotated[tuple[Annotated[int, msgspec.Meta(ge=-1)], ...], msgspec.Meta(description="-1: any size.")]


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or an output of a function."""

    name: str
    datatype: str
    shape: Dims


class ModelMetadata(msgspec.Struct, frozen=True):
    """A function's inputs and outputs."""

    name: FunctionName
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class ModelReady(msgspec.Struct, frozen=True):
    """Whether a function answers requests."""

    name: FunctionName
    ready: bool


class ConfigTensor(msgspec.Struct, frozen=True):
    """An input or an output of a function, in Triton's terms."""

    name: str
    data_type: str
    dims: Dims


class InstanceGroup(msgspec.Struct, frozen=True):
    """How many workers a function may have."""

    name: FunctionName
    kind: str
    count: int


class ConfigParameter(msgspec.Struct, frozen=True):
    """A setting of a function, as text."""

    string_value: str


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a function in the format of Triton's model configuration."""

    name: FunctionName
    platform: str
    backend: str = "overwinter"
    version_policy: dict[str, dict[str, str]]
    max_batch_size: int = 0
    """Always 0, as for a model in Triton whose `dims` are whole shapes that include the batch. The function's own
    `max_batch` is among the parameters.
    """
    input: tuple[ConfigTensor, ...]
    output: tuple[ConfigTensor, ...]
    instance_group: tuple[InstanceGroup, ...]
    parameters: dict[str, ConfigParameter]


class IndexEntry(msgspec.Struct, frozen=True):
    """One version of a function, or a pipeline, and its state."""

    name: FunctionName
    version: str
    state: Availability
    reason: str


class MissingBlocks(msgspec.Struct, frozen=True):
    """The blocks that the tenant has to send."""

    missing: tuple[Address, ...]


class StoredBlock(msgspec.Struct, frozen=True):
    """A block that is stored."""

    address: Address
    new: bool
    """Whether the block is new to the tenant."""


class RegisteredFunction(msgspec.Struct, frozen=True):
    """A new version of a function."""

    name: FunctionName
    version: int
    warning: str
    """What the author should know about the trial; empty if there is nothing."""


class RegisteredPipeline(msgspec.Struct, frozen=True):
    """A new version of a pipeline."""

    name: FunctionName
    version: int


class Removed(msgspec.Struct, frozen=True):
    """The removed versions."""

    name: FunctionName
    version: int | None
    """The version; None: all versions."""

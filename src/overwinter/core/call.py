"""A request to a function or a pipeline, and its answer, as the parts of a node hand them on."""

from collections.abc import Callable

import msgspec

from overwinter.core.actions import Start
from overwinter.core.ids import FunctionName, Seconds
from overwinter.core.tensor import Tensor


class Call(msgspec.Struct, frozen=True, gc=False):
    """A request."""

    name: FunctionName
    version: int | None
    """None: the one that answers for the name."""
    inputs: list[Tensor]
    """They match the specs."""
    timeout_s: float | None = None
    """Bounds the wait, at most to the function's or the pipeline's own."""
    priority: int = 0
    """1 goes first, 0 is 100."""
    due: Seconds | None = None
    """The due time of a stage; None: by the function's own SLO."""
    hold: Callable[[int], None] | None = None
    """Reserves this many bytes for tensors that the node keeps until it has answered; raises TooLargeError or
    OverloadedError.
    """


class Result(msgspec.Struct, frozen=True):
    """The answer to a request."""

    name: FunctionName
    version: int
    outputs: list[Tensor]
    """In the order of the specs."""
    start: Start
    """Where the weights were when the request arrived: in a live worker, in the host store, on disk."""

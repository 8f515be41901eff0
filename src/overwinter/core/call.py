"""A request to a function or a pipeline, and its answer, as the parts of a node pass them to each other."""

from collections.abc import Callable

import msgspec

from overwinter.core.actions import Start
from overwinter.core.ids import FunctionName, RunId, Seconds, WorkerId
from overwinter.core.tensor import Tensor


class Call(msgspec.Struct, frozen=True, gc=False):
    """A request."""

    name: FunctionName
    version: int | None
    """The version; None: the node chooses it (core/versions.py)."""
    inputs: list[Tensor]
    """The inputs, which match the specs."""
    timeout_s: float | None = None
    """The timeout. That of the function or pipeline applies if this is None or longer."""
    priority: int = 0
    """The priority: 1 is served first; 0 means the default, 100."""
    due: Seconds | None = None
    """The due time, for a stage of a pipeline or a handler's call; None: given by the function's own SLO."""
    reserve: Callable[[int], None] | None = None
    """Reserves this many bytes for the outputs, and for other tensors that the node keeps until it has answered; raises
    TooLargeError or OverloadedError.
    """
    caller: tuple[WorkerId, RunId] | None = None
    """The run of a handler that waits for the answer."""


class Result(msgspec.Struct, frozen=True):
    """The answer to a request."""

    name: FunctionName
    version: int
    outputs: list[Tensor]
    """The outputs, in the order of the specs."""
    start: Start
    """What the request needed (core/actions.py): nothing (warm), a bind (bound), or a new worker or a transfer to a
    device, with the blocks in the host store (host) or on disk (disk).
    """

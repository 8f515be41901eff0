"""Runs programs on the pool for a worker that runs handlers. Each such run is a call: one message to the node.

The inputs and the outputs of the program pass through the second buffer of the run's slot, which is free until the
run's answer. A slot has one call at a time; the threads of other slots may wait for theirs meanwhile.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch

from overwinter.core.errors import HandlerError, WorkerError, error_named
from overwinter.core.tensor import ANSWER_BYTES_MAX, TensorMeta, TensorSpec
from overwinter.worker.buffer import SharedBuffer, Slot, offsets
from overwinter.worker.messages import Failure, PoolCall, PoolCallResult
from overwinter.worker.values import EncodedTensor, read


class PoolCalls:
    """The calls of one worker."""

    def __init__(self, slots: Sequence[Slot], call: Callable[[PoolCall], PoolCallResult | None]) -> None:
        """`call` sends a message and waits for its answer; None if none will come."""
        self._slots = slots
        self._call = call
        self._numbers = itertools.count(1)
        self._thread = threading.local()

    @contextmanager
    def within(self, slot: int) -> Iterator[None]:
        """Use this slot for the calls of this thread. Outside of this context, as in a trial, it is the first one."""
        self._thread.slot, self._thread.left_s = slot, []
        try:
            yield
        finally:
            self._thread.slot = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a call that the pool leaves to the worker."""
        began = time.perf_counter()
        yield
        if hasattr(self._thread, "left_s"):
            self._thread.left_s.append(time.perf_counter() - began)

    def program_s(self) -> float:
        """The mean seconds of the calls in this thread's run that the pool left to the worker; 0: there were none."""
        return fmean(self._thread.left_s or [0.0])

    def run(
        self, function: str, specs: Sequence[TensorSpec], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...] | None:
        """Run a function's program on the pool; None: the worker is to run it. Raises the error that prevented it."""
        number, slot = next(self._numbers), getattr(self._thread, "slot", 0)
        buffer = self._slots[slot].outputs
        metas = _written(function, specs, inputs, buffer)
        result = self._call(PoolCall(number, function, slot, metas))
        if result is None:
            raise WorkerError(f"the worker of {function} was stopped during its run")
        if result.outcome is None:
            return None
        if isinstance(result.outcome, Failure):
            raise error_named(result.outcome.error)(result.outcome.message)
        *places, nbytes = offsets(result.outcome.metas)
        buffer.grow(nbytes)
        return tuple(_copied(buffer, meta, at) for meta, at in zip(result.outcome.metas, places, strict=True))


def is_sendable(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether these inputs of a program are small enough for one call."""
    return sum(tensor.nbytes for tensor in inputs) <= ANSWER_BYTES_MAX


def _written(
    function: str, specs: Sequence[TensorSpec], inputs: Sequence[torch.Tensor], buffer: SharedBuffer
) -> tuple[TensorMeta, ...]:
    """Write the inputs into the buffer; return their descriptions."""
    sent = [EncodedTensor(spec.name, tensor) for spec, tensor in zip(specs, inputs, strict=True)]
    given = sum(encoded.meta.nbytes for encoded in sent)
    if given > ANSWER_BYTES_MAX:
        raise HandlerError(
            f"the program of {function} would get {given} bytes, and at most {ANSWER_BYTES_MAX} reach the pool in one "
            'run: lower max_batch, or deploy it with device = "cpu"'
        )
    *places, nbytes = offsets(encoded.meta for encoded in sent)
    buffer.grow(nbytes)
    for encoded, at in zip(sent, places, strict=True):
        encoded.write(buffer.map, at)
    return tuple(encoded.meta for encoded in sent)


def _copied(buffer: SharedBuffer, meta: TensorMeta, at: int) -> torch.Tensor:
    value = read(buffer, meta, at)
    assert isinstance(value, torch.Tensor), "no program returns BYTES"
    # The answer of the run will be written to the same place.
    return value.clone()

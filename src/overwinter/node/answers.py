"""Checks the tensors of a worker, which is untrusted: the function's code may control the worker.

The descriptions are checked before anything is copied, so that memory for the tensors can be reserved first. The worker
shares the buffer and may write to it at any time, so the contents of tensors are checked in the copy, in steps.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from math import prod

import msgspec

from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import MESSAGE_MAX, OverwinterError
from overwinter.core.tensor import (
    ANSWER_BYTES_MAX,
    BYTES,
    ELEMENTS_MAX,
    ELEMENTS_OF_STEP,
    Tensor,
    TensorMeta,
    TensorSpec,
    check_steps,
)
from overwinter.node.packed_answers import decode_outcome
from overwinter.worker.buffer import SharedBuffer, offsets
from overwinter.worker.messages import Answer, BindFailed, Failure, LoadFailed, Outputs

KNOWN = frozenset((*DATATYPE_BYTES, BYTES))
ERRORS = {"CallerError", "ProgramError", "HandlerError", "ActivationsError"}
"""The errors that a worker may report; any other counts as a WorkerError."""
Placed = Sequence[tuple[TensorMeta, int]]
"""The descriptions of a request's tensors, each with its offset in the buffer."""


class AnswerCheck:
    """Checks tensors from a worker against their declaration: the outputs of its function, or the inputs of a program
    that its handler calls.
    """

    def __init__(self, outputs: Sequence[TensorSpec], *, counted: bool = True) -> None:
        """`counted` False: its answers may have any number of outputs, because nobody reads them."""
        self._outputs = outputs
        self._counted = counted

    def outcomes_of(self, answer: Answer, known: Container[Failure] = ()) -> list[Placed | Failure]:
        """Return where each request's outputs are in the buffer, or its failure. `known`: the failures that the node
        itself told the worker. Raises ValueError for an impossible answer.
        """
        outputs = [outcome.metas for outcome in answer.outcomes if not isinstance(outcome, Failure)]
        placed = iter(self.placed(outputs))
        return [
            (outcome if outcome in known else reportable(outcome)) if isinstance(outcome, Failure) else next(placed)
            for outcome in answer.outcomes
        ]

    def unpacked(self, packed: msgspec.Raw) -> Outputs | Failure:
        """Decode one outcome. Raises ValueError if it is malformed or does not have the declared number of tensors."""
        outcome: Outputs | Failure = decode_outcome(packed)
        if self._counted and isinstance(outcome, Outputs):
            self._check_count(outcome.metas)
        return outcome

    def placed(self, given: Sequence[Sequence[TensorMeta]]) -> list[Placed]:
        """Return where the tensors of requests are in the buffer, which has them in this order. Raises ValueError if
        that is impossible.
        """
        for metas in given:
            self._check(metas)
        at = offsets(meta for metas in given for meta in metas)
        return [[(meta, next(at)) for meta in metas] for metas in given]

    def _check(self, metas: Sequence[TensorMeta]) -> None:
        """Check the descriptions before the offsets are computed: the sizes may be any numbers."""
        self._check_count(metas)
        nbytes = elements = 0
        for meta, spec in zip(metas, self._outputs, strict=True):
            if not _is_declared(meta, spec):
                raise ValueError(f"a tensor does not match the declared {spec.name!r}")
            if not 0 <= meta.nbytes <= ANSWER_BYTES_MAX or meta.datatype not in KNOWN:
                raise ValueError(f"tensor {spec.name!r} cannot have {meta.nbytes} bytes")
            nbytes += meta.nbytes
            if meta.datatype == BYTES:
                elements += prod(meta.shape)
        if nbytes > ANSWER_BYTES_MAX:
            raise ValueError(f"the tensors of a request have more than {ANSWER_BYTES_MAX} bytes")
        if elements > ELEMENTS_MAX:
            raise ValueError(f"the tensors of a request have more than {ELEMENTS_MAX} elements of BYTES")

    def _check_count(self, metas: Sequence[TensorMeta]) -> None:
        if len(metas) != len(self._outputs):
            raise ValueError(f"it has {len(metas)} tensors, {len(self._outputs)} are declared")


def _is_declared(meta: TensorMeta, spec: TensorSpec) -> bool:
    if meta.name != spec.name or meta.datatype != spec.datatype or len(meta.shape) != len(spec.shape):
        return False
    # A plain loop, because every answer passes here.
    for size, wanted in zip(meta.shape, spec.shape, strict=True):
        if size < 0 or (size != wanted and isinstance(wanted, int)):
            return False
    return True


def copied_tensors(given: Iterable[Placed], buffer: SharedBuffer) -> list[list[Tensor]]:
    """Return a copy of each request's tensors in the buffer, with unchecked contents. Raises OSError or MemoryError as
    `SharedBuffer.take` does.
    """
    return [
        [Tensor(meta.name, meta.datatype, meta.shape, buffer.take(at, meta.nbytes)) for meta, at in placed]
        for placed in given
    ]


def check_contents(copied: Iterable[Iterable[Tensor]]) -> Iterator[None]:
    """Check the copied tensors, in steps of about ELEMENTS_OF_STEP elements. Raises ValueError for an impossible
    content.
    """
    elements = 0
    for tensor in chain.from_iterable(copied):
        try:
            yield from check_steps(tensor)
        except OverwinterError as error:
            raise ValueError(str(error)) from error
        if tensor.datatype == BYTES:
            elements += prod(tensor.shape)
            if elements >= ELEMENTS_OF_STEP:
                elements = 0
                yield


def placed_bytes(placed: Placed) -> int:
    """Return the bytes of a request's tensors."""
    return sum(meta.nbytes for meta, _ in placed)


def reportable(failure: Failure | LoadFailed | BindFailed) -> Failure:
    """Return a worker's failure as far as the node believes it: a known error, and a message of limited length."""
    return Failure(failure.error if failure.error in ERRORS else "WorkerError", failure.message[:MESSAGE_MAX])

"""The outputs of a run in its buffer."""

from contextlib import closing

import torch

from overwinter.worker.batches import _packed
from overwinter.worker.buffer import SharedBuffer
from overwinter.worker.messages import Failure, Outputs

KIB = 1 << 10


def test_requests_whose_outputs_do_not_fit_fail_alone() -> None:
    with closing(SharedBuffer.make("outputs", 128 * KIB)) as buffer:
        sizes = [100 * KIB, 100 * KIB, KIB]
        outcomes = [{"y": torch.full((size,), number, dtype=torch.uint8)} for number, size in enumerate(sizes)]
        first, second, third = _packed(7, outcomes, buffer).outcomes
        assert isinstance(second, Failure)
        assert "max_batch" in second.message
        for outcome, at, number in ((first, 0, 0), (third, 100 * KIB, 2)):
            assert isinstance(outcome, Outputs)
            [meta] = outcome.metas
            assert bytes(buffer.take(at, meta.nbytes)) == bytes([number]) * sizes[number]

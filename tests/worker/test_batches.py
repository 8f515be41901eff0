"""The outputs of a run in its buffer, and its errors in one message."""

from contextlib import closing

import msgspec
import torch

from overwinter.core.errors import MESSAGE_MAX
from overwinter.worker.batches import _packed, shortened
from overwinter.worker.buffer import SharedBuffer
from overwinter.worker.messages import Answer, Failure, Outputs

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


def test_the_errors_of_a_run_fit_together_in_one_message() -> None:
    for count, length in ((1, 1 << 20), (32, 14_000), (1024, 10_000), (4096, 500)):
        failures = shortened([Failure("HandlerError", "\U0001f40c" * length)] * count)
        assert len(failures) == count
        assert all(each.message for each in failures)
        assert len(msgspec.msgpack.encode(Answer(1, failures))) < 400 * KIB
    short = (Failure("HandlerError", "y" * MESSAGE_MAX), Outputs(()), Failure("CallerError", "no"))
    assert shortened(short) == short

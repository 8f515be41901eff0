"""The estimated memory of a run follows the sizes of its inputs and what a profile measured."""

import msgspec
import torch

from overwinter.device.activations import SCRATCH_FACTOR, Activations
from overwinter.device.null import NullProgram
from overwinter.model.export import export

WIDTH = 1 << 16
ROWS = 1024


class Wide(torch.nn.Module):
    def forward(self, x):
        return {"y": (x * 2 + 1).relu().sum(dim=1)}


def activations() -> Activations:
    return Activations(export(Wide(), {"x": torch.zeros(2, WIDTH)}).program)


def test_the_estimated_memory_grows_with_the_batch():
    found = activations()
    one, many = found.nbytes([(1, WIDTH)]), found.nbytes([(64, WIDTH)])
    # Inputs, and two results at a time.
    assert one >= int(SCRATCH_FACTOR * 3 * 4 * WIDTH)
    assert abs(many - 64 * one) <= 64
    assert found.least_bytes() == one


def test_a_profile_replaces_the_assumed_scratch_memory():
    found = activations()
    plain = found.nbytes([(ROWS, WIDTH)]) / SCRATCH_FACTOR
    base = 20 << 20
    found.learn({1: base, ROWS: int(base + 3 * plain)})
    assert 2.9 * plain < found.nbytes([(ROWS, WIDTH)]) < 3.1 * plain
    # A run takes no fewer bytes than its inputs and results.
    found.learn({1: base, ROWS: base})
    assert abs(found.nbytes([(ROWS, WIDTH)]) - plain) <= 1


def test_a_profile_of_small_runs_changes_nothing():
    found = activations()
    before = found.nbytes([(1, WIDTH)])
    found.learn({})
    found.learn({1: 20 << 20})
    found.learn({1: 20 << 20, 2: 90 << 20})
    assert found.nbytes([(1, WIDTH)]) == before


def test_sizes_that_no_float_holds_need_more_than_any_device_has():
    program = export(Wide(), {"x": torch.zeros(2, WIDTH)}).program
    [spec] = program.inputs
    large = msgspec.structs.replace(spec, shape=("batch", *[1 << 40] * 63))
    found = Activations(msgspec.structs.replace(program, inputs=(large,)))
    assert found.least_bytes() >= 1 << 60
    assert found.nbytes([(ROWS, *[1 << 40] * 63)]) >= 1 << 60


class AtLeast64(torch.nn.Module):
    """Refuses the smallest batch with the other sizes of the example."""

    def forward(self, x):
        torch._check(x.shape[0] * x.shape[1] >= 64)
        return {"y": (x * 2 + 1).relu().sum(dim=2)}


def test_a_measured_request_has_the_batch_of_the_example_if_the_program_refuses_the_smallest_batch():
    example = torch.zeros(8, 16, WIDTH >> 3)
    program = export(AtLeast64(), {"x": example}, {"x": {0: "batch", 1: "sequence"}}).program
    found = Activations(program)
    few, many = (found.nbytes([(rows, *example.shape[1:])]) / SCRATCH_FACTOR for rows in (8, 512))
    found.learn({1: int(few), 64: int(many)})
    assert abs(found.nbytes([example.shape]) - few) <= 1
    assert NullProgram(program, {1: 0.01, 2: 0.02})._seconds([example]) == 0.01

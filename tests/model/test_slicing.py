"""Slices of a program cover it in order, take exactly what they use, and together compute the same bits."""

import random
from itertools import pairwise

import pytest
import torch

from benchmarks import zoo
from overwinter.core.errors import ProgramError
from overwinter.model import slicing
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from overwinter.model.program import Call, Program, Slot, Value, decode_program, encode_program, validate
from overwinter.model.slicing import Slicer
from overwinter.model.structure import slots_of
from tests.model.tiny import BATCH_BY_4, make_program


def possible(slicer: Slicer) -> list[int]:
    return [cut for cut, _ in slicer.cuts()]


def run(program: Program, weights, inputs: dict, bounds) -> list[torch.Tensor]:
    """Run slices one after another, each with its own weights and copies of what it takes."""
    slicer, named = Slicer(program), dict(inputs)
    by_name = {weight.name: tensor for weight, tensor in zip(program.weights, weights, strict=True)}
    for start, stop in bounds:
        part = slicer.slice(start, stop)
        validate(part)
        assert decode_program(encode_program(part)) == part
        own = [by_name[weight.name] for weight in part.weights]
        given = compile_program(part)(own, [named[spec.name].clone() for spec in part.inputs])
        named |= {spec.name: value.contiguous() for spec, value in zip(part.outputs, given, strict=True)}
    return [named[spec.name] for spec in program.outputs]


def check_uses(part: Program) -> None:
    """Each weight and each input is read or returned."""
    read = {slot for call in part.calls for slot in slots_of(call)} | set(part.output_slots)
    assert set(range(part.first_value)) <= read


@pytest.mark.parametrize("name", ["gpt2", "llama-small", "lstm", "minilm", "resnet50"])
def test_slices_compute_the_bits_of_the_whole(name: str):
    model = zoo.build(name, small=True)
    program, weights = export(model.module, model.example_inputs, model.dynamic)
    slicer, end, chance = Slicer(program), len(program.calls), random.Random(0)
    cuts = possible(slicer)
    assert cuts
    inputs = dict(model.example_inputs)
    with torch.inference_mode():
        whole = compile_program(program)(weights, [inputs[spec.name] for spec in program.inputs])
        for number in range(1, min(6, len(cuts) + 1)):
            at = [0, *sorted(chance.sample(cuts, number)), end]
            bounds = list(pairwise(at))
            assert all(map(torch.equal, whole, run(program, weights, inputs, bounds)))
            for start, stop in bounds:
                part = slicer.slice(start, stop)
                # The first slice takes all inputs of the program.
                if start:
                    check_uses(part)
                own = [call.operator for call in part.calls[len(part.calls) - (stop - start) :]]
                assert own == [call.operator for call in program.calls[start:stop]]


def test_slices_take_only_inputs_and_what_earlier_slices_return_and_together_have_all_weights():
    model = zoo.build("minilm", small=True)
    program, _ = export(model.module, model.example_inputs, model.dynamic)
    slicer, cuts = Slicer(program), possible(Slicer(program))
    at = [0, *cuts[:: len(cuts) // 5], len(program.calls)]
    known, names = {spec.name for spec in program.inputs}, set()
    for start, stop in pairwise(at):
        part = slicer.slice(start, stop)
        assert {spec.name for spec in part.inputs} <= known
        known |= {spec.name for spec in part.outputs}
        names |= {weight.name for weight in part.weights}
    assert names == {weight.name for weight in program.weights}


def in_place():
    """Writes to the first value after another value was computed from it."""
    calls = [
        Call("aten.mul.Tensor", (Slot(1), Slot(0)), {}, (2,)),
        Call("aten.add.Tensor", (Slot(2), Slot(0)), {}, (3,)),
        Call("aten.relu_.default", (Slot(2),), {}, (4,)),
        Call("aten.add.Tensor", (Slot(4), Slot(3)), {}, (5,)),
        Call("aten.add.Tensor", (Slot(5), Slot(0)), {}, (6,)),
    ]
    own = Value("float32", BATCH_BY_4, shape=("batch", 4))
    return make_program(calls, values=(own, own, Value("float32", BATCH_BY_4, 2), own, own))


def test_a_value_that_is_written_to_later_is_not_sent_before_the_write():
    program = in_place()
    assert [cut for cut, _ in Slicer(program).cuts()] == [3, 4]
    x, weight = torch.linspace(-1, 1, 8).view(2, 4), torch.tensor([1.0, -2.0, 3.0, -4.0])
    expected = (x * weight).relu() + (x * weight + weight) + weight
    for cut in (3, 4):
        [y] = run(program, [weight], {"x": x}, [(0, cut), (cut, 5)])
        assert torch.equal(y, expected)


def test_what_is_written_into_the_copy_of_a_constant_reaches_later_slices():
    class Net(torch.nn.Module):
        def forward(self, x):
            scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
            scale[1] = x.mean()
            return x * scale + 1

    program, weights = export(Net(), (torch.ones(2, 4),))
    slicer, end, x = Slicer(program), len(program.calls), torch.linspace(-1, 2, 8).view(2, 4)
    assert possible(slicer)
    for cut in possible(slicer):
        assert torch.equal(run(program, weights, {"x": x}, [(0, cut), (cut, end)])[0], Net()(x))


def test_no_cut_is_made_where_a_later_slice_cannot_get_a_value_that_it_needs():
    program = in_place()
    values = (*program.values[:3], Value("float32", BATCH_BY_4), program.values[4])
    assert possible(Slicer(make_program(program.calls, values=values))) == [3]
    number = make_program(program.calls, values=(*program.values[:3], Value("symint", ()), program.values[4]))
    # A number is computed again, and what it needs can be sent.
    assert possible(Slicer(number)) == [3, 4]


@pytest.mark.parametrize("name", [pytest.param("densenet201", marks=pytest.mark.slow), "llama-small"])
def test_a_program_can_be_cut_exactly_where_the_later_slice_can_get_what_it_needs(name: str):
    model = zoo.build(name, small=True)
    program, _ = export(model.module, model.example_inputs, model.dynamic)
    slicer, cuts = Slicer(program), possible(Slicer(program))
    refused = []
    for cut in range(1, len(program.calls)):
        try:
            slicer.slice(cut, len(program.calls))
        except ProgramError:
            refused.append(cut)
    assert not set(refused) & set(cuts)
    assert len(refused) + len(cuts) == len(program.calls) - 1


def test_the_calls_that_a_slice_repeats_are_not_read_for_each_result(monkeypatch):
    """A call with many arguments and many results, which depend on weights only."""
    read = []
    count = 300
    results = tuple(range(2, 2 + count))
    calls = [
        Call("aten.broadcast_tensors.default", (tuple(Slot(0) for _ in range(count)),), {}, results),
        Call("aten.relu.default", (Slot(1),), {}, (2 + count,)),
        Call("aten.cat.default", (tuple(map(Slot, results)), 0), {}, (3 + count,)),
    ]
    program = make_program(calls, values=tuple(Value("float32", BATCH_BY_4) for _ in range(count + 2)))
    slots = slicing.slots_of
    monkeypatch.setattr(slicing, "slots_of", lambda call: read.append(call) or slots(call))
    slicer = Slicer(program)
    assert list(slicer.cuts()) != []
    slicer.slice(2, 3)
    assert len(read) < 10 * len(calls)


def test_a_value_that_many_calls_wrote_to_in_place_reaches_the_next_slice():
    count = 50
    calls = [
        Call("aten.mul.Tensor", (Slot(1), Slot(0)), {}, (2,)),
        *(Call("aten.relu_.default", (Slot(slot),), {}, (slot + 1,)) for slot in range(2, 2 + count)),
        Call("aten.add.Tensor", (Slot(2 + count), Slot(2 + count // 2)), {}, (3 + count,)),
    ]
    own = Value("float32", BATCH_BY_4, shape=("batch", 4))
    values = (own, *(Value("float32", BATCH_BY_4, slot) for slot in range(2, 2 + count)), own)
    program = make_program(calls, values=values)
    x, weight = torch.linspace(-1, 1, 8).view(2, 4), torch.tensor([1.0, -2.0, 3.0, -4.0])
    [y] = run(program, [weight], {"x": x}, [(0, count + 1), (count + 1, count + 2)])
    assert torch.equal(y, 2 * (x * weight).relu())


def test_a_value_that_cannot_be_sent_is_named():
    program = in_place()
    unknown = make_program(program.calls, values=tuple(Value("float32", BATCH_BY_4, v.base) for v in program.values))
    with pytest.raises(ProgramError, match=r"value 3, a result of aten.add.Tensor, cannot be sent"):
        Slicer(unknown).slice(3, 5)

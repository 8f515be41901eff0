"""Every model of the zoo as a program: the same bits as eager PyTorch, and values of the described sizes."""

import pytest
import torch

from benchmarks import zoo
from benchmarks.programs import cases, flatten, sized_inputs
from overwinter.model.compile import compile_program, resolve
from overwinter.model.liveness import dimension_sizes, live_in, peak_activation_bytes
from overwinter.model.operators import FRESH, SIZE_OPERATORS, SYMBOLIC
from overwinter.model.program import Device, Dtype, MemoryFormat, Slot, decode_program, encode_program, validate
from overwinter.model.structure import SYMBOLIC_KINDS, evaluate
from tests.model.zoo_models import exported

QUICK = {"resnet50", "mobilenet-v2", "vgg16", "ssd300", "vit-base", "minilm", "gpt2", "textcnn", "lstm", "dssm", "mlp"}
"""Models of every kind."""
MODELS = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in zoo.NAMES]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A small model, its program as decoded from bytes, and its weights."""
    built, program, weights = exported(request.param)
    program = decode_program(encode_program(program))
    validate(program)
    return built, program, weights


def test_program_gives_the_same_bits_as_the_model(model):
    built, program, weights = model
    compiled = compile_program(program)
    compared = list(cases(program))
    assert {case["batch"] for case in compared} == {1, 2, 3, 5}
    for sizes in compared:
        inputs = sized_inputs(program, built, sizes)
        with torch.inference_mode():
            expected = flatten(built.module(**inputs))
            given = compiled(weights, [inputs[spec.name] for spec in program.inputs])
        assert len(given) == len(expected) == len(program.outputs)
        assert all(map(torch.equal, given, expected)), sizes


def test_weights_are_as_the_program_describes_them_and_in_order_of_use(model):
    _, program, weights = model
    assert [(str(tensor.dtype), tuple(tensor.shape)) for tensor in weights] == [
        (f"torch.{weight.dtype}", weight.shape) for weight in program.weights
    ]
    used = [slot for call in program.calls for slot in _slots(call) if slot < program.first_input]
    assert list(dict.fromkeys(used)) == list(range(len(weights)))


def test_layers_have_costs_and_cover_all_weights(model):
    _, program, _ = model
    assert sum(layer.weight_bytes for layer in program.layers) == sum(weight.nbytes for weight in program.weights)
    assert sum(layer.macs for layer in program.layers) > 0
    assert all(layer.output_bytes > 0 for layer in program.layers)


@torch.inference_mode()
def test_values_are_as_large_and_share_memory_as_described(model):
    built, program, weights = model
    sizes = dimension_sizes(program, {"batch": 3})
    inputs = sized_inputs(program, built, sizes)
    held = _Held(program, weights, [inputs[spec.name] for spec in program.inputs])
    for call in program.calls:
        results = _called(call, held.values)
        sources = {_memory(held.values[slot]) for slot in _slots(call)} - {None}
        for slot, result in zip(call.outputs, results, strict=True):
            value = program.values[slot - program.first_value]
            held.add(slot, result)
            if value.dtype in SYMBOLIC_KINDS:
                continue
            assert f"torch.{value.dtype}" == str(result.dtype)
            assert evaluate(value.nbytes, sizes) == result.nbytes
            shares = _memory(result) in sources
            assert not (shares and call.operator in FRESH), call
            assert shares == (value.base >= 0), call
        held.drop(call.frees)
    assert peak_activation_bytes(program, sizes) == held.peak


class _Held:
    """What each slot holds, and the bytes of the memory behind it, weights left out."""

    def __init__(self, program, weights, inputs):
        self.values = dict(enumerate(weights))
        self.holders = dict.fromkeys(map(_memory, weights), 1)
        self.alive = self.peak = 0
        for slot, tensor in zip(live_in(program), inputs, strict=True):
            self.add(slot, tensor)

    def add(self, slot, result):
        self.values[slot] = result
        memory = _memory(result)
        if memory is None:
            return
        if not self.holders.get(memory):
            self.alive += result.untyped_storage().nbytes()
        self.holders[memory] = self.holders.get(memory, 0) + 1
        self.peak = max(self.peak, self.alive)

    def drop(self, slots):
        for slot in slots:
            result = self.values.pop(slot)
            memory = _memory(result)
            if memory is None:
                continue
            self.holders[memory] -= 1
            if not self.holders[memory]:
                self.alive -= result.untyped_storage().nbytes()


def _memory(thing):
    return thing.untyped_storage().data_ptr() if isinstance(thing, torch.Tensor) else None


def _slots(call):
    parts = [part for argument in (*call.args, *call.kwargs.values()) for part in _parts(argument)]
    return [part.number for part in parts if isinstance(part, Slot)]


def _parts(argument):
    return argument if isinstance(argument, tuple) else (argument,)


def _called(call, held):
    """The results of one call, which is executed without compilation."""

    def real(argument):
        match argument:
            case tuple():
                return [real(part) for part in argument]
            case Slot(number):
                return held[number]
            case Dtype(name) | MemoryFormat(name):
                return getattr(torch, name)
            case Device():
                return torch.device("cpu")
        return argument

    function = SYMBOLIC.get(call.operator) or resolve(call.operator)
    result = function(*map(real, call.args), **{key: real(value) for key, value in call.kwargs.items()})
    assert (call.operator in SIZE_OPERATORS or call.operator in SYMBOLIC) == isinstance(result, int | float)
    return result if isinstance(result, tuple | list) else [result]

"""Programs made by hand, small enough to reason about."""

from overwinter.core.tensor import TensorSpec
from overwinter.model.liveness import with_frees
from overwinter.model.program import Call, Layer, Program, Slot, Term, Value, Weight

BATCH_BY_4 = (Term(16.0, (1,)),)
"""Bytes of a float32 tensor of shape (batch, 4)."""


def make_program(calls, values=None, outputs=None, weights=1, layers=None):
    """A program over weights of shape (4,) (slots from 0), one input `x` of shape (batch, 4), and these calls."""
    first_value = weights + 1
    made = sum(len(call.outputs) for call in calls)
    outputs = (first_value + made - 1,) if outputs is None else outputs
    return Program(
        inputs=(TensorSpec("x", "FP32", ("batch", 4)),),
        outputs=tuple(TensorSpec(f"y{at}", "FP32", ("batch", 4)) for at in range(len(outputs))),
        weights=tuple(Weight(f"w{at}", "float32", (4,)) for at in range(weights)),
        calls=with_frees(calls, first_value, outputs),
        values=tuple(Value("float32", BATCH_BY_4) for _ in range(made)) if values is None else values,
        output_slots=outputs,
        layers=(Layer("", 0, len(calls), 0, 16, 16),) if layers is None else layers,
        dimensions={"batch": (1, 64)},
        example={"batch": 1},
    )


def chain():
    """relu(x * w + w): weight 0, input 1, values 2 to 4."""
    return make_program(
        [
            Call("aten.mul.Tensor", (Slot(1), Slot(0)), {}, (2,)),
            Call("aten.add.Tensor", (Slot(2), Slot(0)), {"alpha": 1}, (3,)),
            Call("aten.relu.default", (Slot(3),), {}, (4,)),
        ]
    )

"""The assumptions of an export become checks: the program refuses the sizes that the exported program refuses."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.export import Dim

from overwinter.core.errors import ProgramError
from overwinter.model.checks import WINDOW, conditions_of, is_satisfied, narrowed
from overwinter.model.export import export, export_saved
from overwinter.model.program import Call, Slot, Value, encode_program, validate
from overwinter.model.structure import Term
from overwinter.worker.messages import Failure
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner
from tests.model.tiny import make_program

AUTO = Dim.AUTO


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y=None):
        return self.function(x) if y is None else self.function(x, y)


class Nested(nn.Module):
    """Six inputs, in containers and by keyword, of which four have guards."""

    def forward(self, x, *rest, scale, more):
        x = x * 2 if x.shape[0] % 2 == 0 else -x
        x = x + 1 if rest[1].shape[0] % 3 == 0 else x
        x = x + 2 if scale.shape[0] % 5 == 0 else x
        return x + 4 if more["a"][1].shape[0] % 7 == 0 else x


def even(x):
    return x if x.shape[0] % 2 == 0 else -x


def large(x):
    return x if x.shape[0] * x.shape[1] > 12 else -x


def total(x, y):
    return x + y


def pairs(x):
    torch._check(x.shape[1] % 2 == 0, lambda: "give an even length")
    return x.reshape(x.shape[0], -1, 2)


def halves(x, y):
    return x[:, ::2] + y


def twice(x, y):
    return torch.cat([x, x], 1) * y


class Served:
    """A program that runs as in a worker."""

    def __init__(self, exported):
        self.inputs = exported.program.inputs
        self.runner = Runner("f@1", Prepared(encode_program(exported.program)), exported.weights, None)

    def __call__(self, *inputs):
        """Return the result of a request with these inputs: the first output, or the failure."""
        named = {spec.name: value for spec, value in zip(self.inputs, inputs, strict=True)}
        (found,) = self.runner.answer([named])
        return found if isinstance(found, Failure) else next(iter(found.values()))


def reference(module, *inputs):
    try:
        return module(*inputs)
    except (AssertionError, RuntimeError, ZeroDivisionError):
        return None


LENGTH = Dim("length", max=64)
SAVED = {
    "parity": (even, [(4, 6)], [{0: AUTO, 1: AUTO}]),
    "product": (large, [(4, 6)], [{0: AUTO, 1: AUTO}]),
    "equality": (total, [(4, 6), (4, 6)], [{0: AUTO, 1: AUTO}] * 2),
    "reshape": (pairs, [(4, 6)], [{0: AUTO, 1: AUTO}]),
    "steps": (halves, [(4, 6), (4, 3)], [{0: AUTO, 1: AUTO}] * 2),
    "derived": (halves, [(4, 6), (4, 3)], [{0: AUTO, 1: 2 * LENGTH}, {0: AUTO, 1: LENGTH}]),
    "derived alone": (lambda x: x[:, ::2], [(4, 6)], [{0: AUTO, 1: 2 * LENGTH}]),
    "derived, shifted": (lambda x, y: x[:, 1:] + y, [(4, 6), (4, 5)], [{1: LENGTH + 1}, {1: LENGTH}]),
    "twice": (twice, [(4, 3), (4, 6)], [{0: AUTO, 1: AUTO}] * 2),
    "range": (even, [(4, 6)], [{0: AUTO, 1: Dim("n", min=4, max=9)}]),
}
FORGOTTEN = {("parity", True), ("product", True)}
"""For these the exporter itself keeps no condition, so the exported program answers requests of all sizes."""


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("case", SAVED)
def test_saved_program_answers_only_what_the_export_answers_and_with_the_same_outputs(case, deferred, tmp_path):
    function, shapes, dims = SAVED[case]
    examples = tuple(torch.rand(shape) for shape in shapes)
    saved = torch.export.export(
        Net(function).eval(),
        examples,
        dynamic_shapes=dict(zip(("x", "y"), dims, strict=False)),
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=deferred,
    )
    torch.export.save(saved, tmp_path / "net.pt2")
    served, module = Served(export_saved(tmp_path / "net.pt2")), saved.module()
    answered = refused = 0
    for batch, *lengths in product(range(2, 6), *[range(2, 9) for _ in shapes]):
        inputs = [torch.rand(batch, length) for length in lengths]
        expected, given = reference(module, *inputs), served(*inputs)
        if isinstance(given, Failure):
            assert given.error == "CallerError"
            refused += 1
        else:
            assert expected is not None, [tensor.shape for tensor in inputs]
            assert torch.equal(expected, given)
            answered += 1
    assert answered
    assert bool(refused) == ((case, deferred) not in FORGOTTEN)


def test_guards_on_nested_inputs_are_checked(tmp_path):
    sizes = {"x": 2, "rest_0": 3, "rest_1": 6, "scale": 5, "more_a_0": 7, "more_a_1": 14}
    x, first, second, scale, left, right = (torch.arange(size).float() for size in sizes.values())
    more = {"a": (left, right)}
    dynamic = {
        "x": {0: AUTO},
        "rest": ({0: AUTO}, {0: AUTO}),
        "scale": {0: AUTO},
        "more": {"a": ({0: AUTO}, {0: AUTO})},
    }
    for strict in (False, True):
        saved = torch.export.export(
            Nested(), (x, first, second), {"scale": scale, "more": more}, dynamic_shapes=dynamic, strict=strict
        )
        torch.export.save(saved, tmp_path / "nested.pt2")
        served = Served(export_saved(tmp_path / "nested.pt2"))
        assert [spec.name for spec in served.inputs] == list(sizes)
        assert torch.equal(served(x, first, second, scale, left, right), x * 2 + 7)
        for name, said in [("x", "% 2"), ("rest_1", "% 3"), ("scale", "% 5"), ("more_a_1", "% 7")]:
            wrong = [torch.rand(size + (each == name)) for each, size in sizes.items()]
            assert said in served(*wrong).message


@pytest.mark.parametrize("saved", [False, True])
def test_guards_distinguish_inputs_whose_names_differ_only_in_case(saved, tmp_path):
    class Cased(nn.Module):
        def forward(self, x, X):
            x = x * 2 if x.shape[1] % 2 == 0 else -x
            return x + 1 if X.shape[1] % 3 == 0 else x

    x, X = torch.rand(2, 4), torch.rand(2, 9)
    if saved:
        made = torch.export.export(Cased(), (x, X), dynamic_shapes={"x": {1: AUTO}, "X": {1: AUTO}})
        torch.export.save(made, tmp_path / "net.pt2")
        served = Served(export_saved(tmp_path / "net.pt2"))
    else:
        served = Served(export(Cased(), (x, X), {"x": {1: "n"}, "X": {1: "m"}}))
    assert torch.equal(served(x, X), x * 2 + 1)
    assert "% 2" in served(torch.rand(2, 3), X).message
    assert "% 3" in served(x, torch.rand(2, 8)).message


def test_the_authors_message_is_quoted_if_sizes_do_not_fit():
    served = Served(export(Net(pairs), (torch.rand(2, 6),), {"x": {0: "batch", 1: "n"}}))
    failure = served(torch.rand(2, 5))
    assert failure.error == "CallerError"
    assert "give an even length" in failure.message
    assert "n % 2 == 0" in failure.message
    assert torch.equal(served(torch.arange(8.0).reshape(2, 4)), torch.arange(8.0).reshape(2, 2, 2))


def test_checks_on_sizes_come_before_the_operators_on_tensors():
    exported = export(Net(lambda x: pairs(torch.relu(x))), (torch.rand(2, 6),), {"x": {0: "batch", 1: "n"}})
    names = [call.operator for call in exported.program.calls]
    assert "aten._assert_scalar.default" in names
    last = len(names) - 1 - names[::-1].index("aten._assert_scalar.default")
    assert last < names.index("aten.relu.default")


def test_a_condition_that_is_a_range_narrows_the_range_of_the_size_and_needs_no_check():
    module = Net(lambda x: nn.functional.avg_pool1d(x[:, None], 4))
    exported = export(module, (torch.rand(2, 12),), {"x": {0: "batch", 1: "n"}})
    low, _ = exported.program.dimensions["n"]
    assert low >= 4
    assert "aten._assert_scalar.default" not in [call.operator for call in exported.program.calls]


@pytest.mark.parametrize("part", [lambda n: int(n / 2), lambda n: int(n * 0.5), lambda n: max(1, int(0.25 * n + 1))])
def test_sizes_of_which_a_rounded_fraction_is_the_same_become_a_range_without_a_check(part):
    module = Net(lambda x: x[:, : part(x.shape[1])].sum(1))
    exported = export(module, (torch.rand(2, 12),), {"x": {0: "batch", 1: "n"}})
    low, high = exported.program.dimensions["n"]
    assert low <= 12 <= high
    assert {part(n) for n in range(low, high + 1)} == {part(12)}
    assert "aten._assert_scalar.default" not in [call.operator for call in exported.program.calls]


class UNet(nn.Module):
    """Three levels down and up again, with skip connections: height and width must be multiples of 8."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(width, 4, 3, padding=1) for width in (3, 4, 4, 4)])
        self.up = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1) for _ in range(3)])

    def forward(self, x):
        kept = []
        for layer in self.down[:3]:
            x = layer(x).relu()
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[3](x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, kept.pop()], 1)).relu()
        return x


def test_unet_takes_only_heights_and_widths_that_are_multiples_of_8():
    module = UNet().eval()
    served = Served(export(module, (torch.rand(2, 3, 32, 24),), {"x": {0: "batch", 2: "height", 3: "width"}}))
    with torch.no_grad():
        for size in [(2, 3, 32, 24), (1, 3, 16, 64), (3, 3, 40, 48)]:
            x = torch.rand(size)
            assert torch.equal(served(x), module(x))
    assert "height" in served(torch.rand(1, 3, 36, 24)).message
    assert "width" in served(torch.rand(1, 3, 32, 20)).message


def test_guard_that_no_program_can_check_is_refused():
    with pytest.raises(ProgramError, match="depends on more than sizes"):
        conditions_of(["L['x'].stride()[0] == 4"], ["x"], [("batch", 4)])
    with pytest.raises(ProgramError, match="cannot be parsed"):
        conditions_of(["Piecewise((1, x > 2)"], ["x"], [("batch", 4)])
    with pytest.raises(ProgramError, match=r"gcd\(batch, 4\)"):
        is_satisfied(conditions_of(["gcd(L['x'].size()[0], 4) == 1"], ["x"], [("batch", 4)]), {"batch": 3})


@pytest.mark.parametrize(
    ("text", "holds", "fails"),
    [
        ("(1 + L['x'].size()[0]) // 2 != 1", 3, 2),
        ("not L['x'].size()[0] == 2 or False", 3, 2),
        ("max(1, L['x'].size()[0] - 4, 2) == 2", 6, 7),
        ("L['x'].size()[0] ** 2 > 8", 3, 2),
        ("2 < L['x'].size()[0] <= 4", 4, 5),
        ("-L['x'].size()[0] < -2 and L['x'].size()[1] == 4", 3, 2),
        ("math.floor(L['x'].size()[0] / 2) == 2", 5, 6),
        ("math.trunc(0.5*torch.sym_float(L['x'].size()[0])) == 3", 7, 8),
        ("(1 if L['x'].size()[0] > 3 else 0) == 1", 4, 3),
        ("5 % (L['x'].size()[0] - 1) == 1", 3, 1),
    ],
)
def test_conditions_of_every_form_hold_for_the_same_sizes_before_and_after_narrowing(text, holds, fails):
    conditions = conditions_of([text], ["x"], [("batch", 4)])
    assert is_satisfied(conditions, {"batch": holds})
    assert not is_satisfied(conditions, {"batch": fails})
    ranges, kept = narrowed({"batch": (1, 9)}, conditions)
    for size in range(1, 10):
        low, high = ranges["batch"]
        assert (low <= size <= high and is_satisfied(kept, {"batch": size})) == is_satisfied(
            conditions, {"batch": size}
        )


def test_a_condition_that_no_size_in_the_range_satisfies_is_refused():
    with pytest.raises(ProgramError, match="no batch from 1 to 5"):
        narrowed({"batch": (1, 5)}, conditions_of(["L['x'].size()[0] > 7"], ["x"], [("batch", 4)]))


@pytest.mark.parametrize(
    ("text", "narrow"),
    [
        ("L['x'].size()[0] ** 4 < 2147483648", (1, 215)),
        ("L['x'].size()[0] ** 4 >= 16", (2, WINDOW)),
        ("3 * L['x'].size()[0] ** 3 // 7 >= 4", (3, WINDOW)),
        ("L['x'].size()[0] ** 4 - L['x'].size()[0] ** 4 + L['x'].size()[0] <= 9", (1, 9)),
        ("L['x'].size()[0] ** 3 / 3 < 1e18", (1, WINDOW)),
    ],
)
def test_a_condition_on_a_high_power_of_a_size_becomes_a_range(text, narrow):
    conditions = conditions_of([text], ["x"], [("batch", 4)])
    assert narrowed({"batch": (1, WINDOW)}, conditions) == ({"batch": narrow}, [])


def test_a_condition_on_a_high_power_that_is_undefined_for_a_size_remains_a_check():
    conditions = conditions_of(["L['x'].size()[0] ** 4 // (L['x'].size()[0] - 5) < 9"], ["x"], [("batch", 4)])
    assert narrowed({"batch": (1, WINDOW)}, conditions) == ({"batch": (1, WINDOW)}, conditions)


def test_the_equality_of_sizes_with_the_same_name_needs_no_check():
    assert conditions_of(["L['x'].size()[0] == L['y'].size()[0]"], ["x", "y"], [("batch",), ("batch",)]) == []


MALFORMED = {
    "gives nothing": [Call("aten._assert_async.msg", (Slot(1), "no"), {}, (2,))],
    "nothing to check": [Call("aten._assert_scalar.default", ("yes", "no"), {}, ())],
    "check a tensor": [Call("aten._assert_scalar.default", (Slot(1), "no"), {}, ())],
    "check a number": [Call("aten._assert_async.msg", (True, "no"), {}, ())],
    "printable": [Call("aten._assert_async.msg", (Slot(1), "a\nb"), {}, ())],
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_check_is_refused(message):
    calls = MALFORMED[message]
    program = make_program(
        calls, outputs=(1,), values=tuple(Value("bool", (Term(4.0, (0,)),)) for _ in calls[0].outputs)
    )
    with pytest.raises(ProgramError, match=message):
        validate(program)

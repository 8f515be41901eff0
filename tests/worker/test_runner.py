"""Runs of a worker: compatible requests share one, a failed request affects no other, and errors name their cause."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from overwinter.core.errors import HandlerError
from overwinter.core.tensor import TensorSpec
from overwinter.model.export import export
from overwinter.model.program import encode_program
from overwinter.profiling.measuring import least_rows
from overwinter.worker import values
from overwinter.worker.handler import Assets, Code, Handler
from overwinter.worker.messages import Failure
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner
from overwinter.worker.values import encode_outputs


class Embedded(torch.nn.Module):
    """An embedding and a sum, so that an invalid index fails its run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(10, 3).requires_grad_(False)

    def forward(self, ids):
        return {"sum": self.table(ids).sum(dim=1)}


def runner(handler: str | None = None) -> tuple[Runner, list[torch.Size]]:
    exported = export(Embedded().eval(), {"ids": torch.zeros(2, 3, dtype=torch.int64)}, {"ids": {0: "batch", 1: "n"}})
    prepared = Prepared(encode_program(exported.program))
    shapes: list[torch.Size] = []
    run = prepared.run

    def counted(weights, inputs):
        shapes.append(inputs[0].shape)
        return run(weights, inputs)

    prepared.run = counted
    made = Runner("f@1", prepared, exported.weights, None if handler is None else Handler(Code(handler), {}))
    return made, shapes


def ids(*rows: list[int]) -> dict:
    return {"ids": torch.tensor(rows)}


def expected(request: dict) -> torch.Tensor:
    return Embedded()(**request)["sum"]


def test_requests_of_one_shape_share_a_run_and_get_their_own_rows():
    made, shapes = runner()
    requests = [ids([1, 2, 3]), ids([4, 5, 6], [7, 8, 9]), ids([0, 0, 0])]
    outcomes = made.answer(requests)
    assert shapes == [(4, 3)]
    for outcome, request in zip(outcomes, requests, strict=True):
        assert torch.allclose(outcome["sum"], expected(request))


def test_requests_of_different_shapes_run_separately():
    made, shapes = runner()
    outcomes = made.answer([ids([1, 2, 3]), ids([1, 2]), ids([3, 2, 1])])
    assert sorted(shapes) == [(1, 2), (2, 3)]
    assert torch.allclose(outcomes[1]["sum"], expected(ids([1, 2])))


def test_a_bad_request_fails_alone_and_is_its_callers_fault():
    made, _ = runner()
    outcomes = made.answer([ids([1, 2, 3]), ids([1, 2, 99]), ids([4, 5, 6])])
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, True, False]
    assert outcomes[1].error == "CallerError"
    assert "f@1" in outcomes[1].message
    assert "[1, 3]" in outcomes[1].message
    assert torch.allclose(outcomes[2]["sum"], expected(ids([4, 5, 6])))


def test_a_run_of_one_request_equals_plain_pytorch_bit_for_bit():
    made, _ = runner()
    [outcome] = made.answer([ids([1, 2, 3], [4, 5, 6])])
    assert torch.equal(outcome["sum"], expected(ids([1, 2, 3], [4, 5, 6])))


def test_a_handler_runs_before_and_after_the_program_and_its_error_fails_only_one_request():
    made, _ = runner(
        "def preprocess(inputs, state):\n"
        "    return {'ids': inputs['raw'] + 1}\n"
        "def postprocess(outputs, inputs, state):\n"
        "    assert inputs['raw'][0, 0] != 7, 'seven is not liked'\n"
        "    return {'double': outputs['sum'] * 2}\n"
    )
    requests = [{"raw": torch.tensor([[1, 2]])}, {"raw": torch.tensor([[7, 2]])}]
    good, bad = made.answer(requests)
    assert torch.allclose(good["double"], 2 * expected(ids([2, 3])))
    assert bad.error == "HandlerError"
    assert "seven is not liked" in bad.message
    assert "line 4" in bad.message


def test_errors_say_which_tensor_or_type_a_handler_must_return_or_returned():
    no_tensor, _ = runner("def preprocess(inputs, state):\n    return {'ids': [1, 2]}\n")
    wrong, _ = runner("import torch\ndef preprocess(inputs, state):\n    return {'ids': torch.zeros(1, 2)}\n")
    none, _ = runner("def postprocess(outputs, inputs, state):\n    return None\n")
    assert "'ids'" in no_tensor.answer([ids([1])])[0].message
    assert "INT64" in wrong.answer([ids([1])])[0].message
    assert "NoneType" in none.answer([ids([1])])[0].message


@pytest.mark.parametrize("inputs", ["{}", "{'ids': inputs['ids'].float()}", "{'ids': inputs['ids'][0]}"])
def test_inputs_that_a_handler_makes_wrongly_are_the_fault_of_the_handler(inputs):
    made, _ = runner(f"def preprocess(inputs, state): return {inputs} if inputs['ids'][0, 0] == 7 else inputs")
    good, bad, long = made.answer([ids([1, 2]), ids([7, 2]), {"ids": torch.zeros(2000, 2, dtype=torch.int64)}])
    assert torch.allclose(good["sum"], expected(ids([1, 2])))
    assert (bad.error, "'ids'" in bad.message) == ("HandlerError", True)
    assert (long.error, "batch must be" in long.message) == ("CallerError", True)


def test_a_warm_up_runs_the_program_once_on_a_batch_of_one():
    made, shapes = runner()
    made.warm_up()
    assert shapes == [(1, 3)]


def test_several_threads_run_the_program_at_the_same_time_and_get_the_bits_of_separate_runs():
    made, _ = runner()
    requests = [ids([n, 2, 3], [4, 5, 9 - n]) for n in range(3)]
    alone = [made.answer([request])[0]["sum"] for request in requests]
    meeting = threading.Barrier(3, timeout=60)
    run = made._run

    def met(weights, inputs):
        # All three must be inside at the same time to pass.
        meeting.wait()
        return run(weights, inputs)

    made._run = met
    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(lambda request: made.answer([request]), requests))
    assert all(torch.equal(outcome["sum"], wanted) for [outcome], wanted in zip(outcomes, alone, strict=True))


def test_a_handler_is_called_by_one_thread_at_a_time():
    made, _ = runner(
        "import threading\n"
        "def setup(assets):\n"
        "    return threading.Lock()\n"
        "def preprocess(inputs, state):\n"
        "    assert state.acquire(blocking=False), 'called while it is called'\n"
        "    threading.Event().wait(0.001)\n"
        "    state.release()\n"
        "    return inputs\n"
        "def postprocess(outputs, inputs, state):\n"
        "    return preprocess(outputs, state)\n"
    )
    with ThreadPoolExecutor(4) as pool:
        outcomes = [outcome for [outcome] in pool.map(lambda n: made.answer([ids([n % 10])]), range(40))]
    assert [outcome for outcome in outcomes if isinstance(outcome, Failure)] == []


class Grown(torch.nn.Module):
    """A model with two outputs of different rank."""

    def forward(self, x):
        return {"twice": x * 2, "sum": x.sum(-1)}


def misdeclared(change) -> Runner:
    exported = export(Grown(), {"x": torch.zeros(2, 3)})
    prepared = Prepared(encode_program(exported.program))
    run = prepared.run
    prepared.run = lambda weights, inputs: change(*run(weights, inputs))
    return Runner("f@1", prepared, exported.weights, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda twice, total: (twice.double(), total),
        lambda twice, total: (twice, total.sum()),
        lambda twice, total: (twice[:, :2], total),
        lambda twice, total: (twice, total.repeat(2)),
    ],
    ids=["dtype", "rank", "fixed size", "batch"],
)
def test_an_answer_other_than_declared_is_an_error_of_the_function(change):
    made = misdeclared(change)
    for outcome in made.answer([{"x": torch.ones(1, 3)}, {"x": torch.zeros(2, 3)}]):
        assert outcome.error == "HandlerError"
        assert "f@1" in outcome.message
        assert "'twice'" in outcome.message or "'sum'" in outcome.message
    with pytest.raises(HandlerError, match="declare"):
        made.warm_up()


def test_requests_whose_rows_are_also_columns_are_never_joined():
    class Square(torch.nn.Module):
        def forward(self, a):
            return a @ a

    exported = export(Square(), {"a": torch.zeros(3, 3)}, {"a": {0: "batch", 1: "batch"}})
    made = Runner("f@1", Prepared(encode_program(exported.program)), exported.weights, None)
    requests = [{"a": torch.randn(3, 3)} for _ in range(2)]
    for outcome, request in zip(made.answer(requests), requests, strict=True):
        assert torch.equal(outcome["output"], request["a"] @ request["a"])


class Flattened(torch.nn.Module):
    """Makes its image contiguous before it is viewed, which an export with a contiguous example leaves out."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 8, 3).requires_grad_(False)

    def forward(self, x):
        return {"y": self.layer(x).relu().contiguous().view(x.shape[0], -1)}


def test_a_handler_may_return_tensors_in_any_memory_order():
    module = Flattened()
    made = export(module, {"x": torch.randn(2, 3, 32, 32)})
    handler = "def preprocess(inputs, state):\n    return {'x': inputs['x'].permute(0, 3, 1, 2)}\n"
    one = Runner("f@1", Prepared(encode_program(made.program)), made.weights, Handler(Code(handler), {}))
    images = [torch.randn(1, 32, 32, 3) for _ in range(2)]
    for outcomes in (one.answer([{"x": images[0]}]), one.answer([{"x": image} for image in images])):
        for image, outcome in zip(images, outcomes, strict=False):
            torch.testing.assert_close(outcome["y"], module(image.permute(0, 3, 1, 2))["y"])


class Grouped(torch.nn.Module):
    """Takes batches whose elements divide into groups of four."""

    def forward(self, x):
        return {"y": x + x.view(-1, 4).sum()}


def test_a_warm_up_uses_a_batch_that_the_program_accepts_with_its_other_sizes():
    made = export(Grouped(), {"x": torch.randn(2, 6)}, {"x": {0: "batch", 1: "n"}})
    one = Runner("f@1", Prepared(encode_program(made.program)), made.weights, None)
    assert one.warm_up() == 2 * 6 * 4
    assert least_rows(made.program) == 2
    assert [len(each["y"]) for each in one.answer([{"x": torch.randn(1, 8)}])] == [1]


def test_a_request_for_which_a_handler_returns_an_enormous_tensor_fails_alone():
    handler = """
def preprocess(inputs, state):
    ids = inputs["ids"]
    return {"ids": ids[:1, :1].expand(1 << 40, 3) if ids[0, 0] == 9 else ids}
"""
    made, _ = runner(handler)
    bad, good = made.answer([ids([9, 9, 9]), ids([1, 2, 3])])
    assert (bad.error, "batch" in bad.message) == ("CallerError", True)
    assert torch.allclose(good["sum"], expected(ids([1, 2, 3])))


def test_a_handler_may_answer_with_no_rows_of_strings():
    source = """
OUTPUTS = [{"name": "rows", "datatype": "BYTES", "shape": ["found", 2]}]

def postprocess(outputs, inputs, state):
    return {"rows": [[b"a", b"1"], [b"b", b"2"]][: int(inputs["ids"][0, 0])]}
"""
    exported = export(Embedded().eval(), {"ids": torch.zeros(2, 3, dtype=torch.int64)})
    prepared = Prepared(encode_program(exported.program))
    specs = (TensorSpec("rows", "BYTES", ("found", 2)),)
    made = Runner("f@1", prepared, exported.weights, Handler(Code(source), {}), specs)
    outcomes = made.answer([ids([rows, 0, 0]) for rows in (2, 0)])
    shapes = [encoded.meta.shape for outcome in outcomes for encoded in encode_outputs(outcome)]
    assert shapes == [(2, 2), (0, 2)]


def test_without_preprocess_a_request_may_have_strings_for_postprocess():
    source = "def postprocess(outputs, inputs, state): return {'names': inputs['names'], 'sum': outputs['sum']}"
    made, _ = runner(source)
    outcomes = made.answer([{**ids([1, 2, 3]), "names": [name]} for name in (b"a", b"b")])
    assert [outcome["names"] for outcome in outcomes] == [[b"a"], [b"b"]]
    assert torch.allclose(outcomes[0]["sum"], expected(ids([1, 2, 3])))


class Sums(torch.nn.Module):
    def forward(self, x):
        return {"y": x.sum(dim=1, keepdim=True)}


KEPT = {
    "preprocess": """
import torch
def setup(assets): return torch.zeros(1, 3)
def preprocess(inputs, state):
    state.copy_(inputs["x"])
    return {"x": state}
""",
    "postprocess": """
import torch
def setup(assets): return torch.zeros(1, 1)
def postprocess(outputs, inputs, state):
    state.copy_(outputs["y"])
    return {"y": state}
""",
}


def sums(handler) -> Runner:
    made = export(Sums().eval(), {"x": torch.zeros(2, 3)}, {"x": {0: "batch"}})
    return Runner("f@1", Prepared(encode_program(made.program)), made.weights, Handler(Code(handler), {}))


@pytest.mark.parametrize("step", KEPT)
def test_a_handler_may_return_the_same_tensor_object_for_each_request_of_a_run(step):
    answers = sums(KEPT[step]).answer([{"x": torch.full((1, 3), float(number))} for number in (1, 2, 3)])
    assert [each["y"].tolist() for each in answers] == [[[3.0]], [[6.0]], [[9.0]]]


class Anchored(torch.nn.Module):
    """A model with an output that is the same in all rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("base", torch.ones(3))

    def forward(self, x):
        return {"shift": x * 2, "anchor": (self.base * 10).expand(x.shape[0], 3)}


def test_a_handler_may_write_to_outputs_that_are_the_same_in_all_rows_of_a_run():
    exported = export(Anchored().eval(), {"x": torch.zeros(2, 3)}, {"x": {0: "batch"}})
    source = "def postprocess(outputs, inputs, state): return {'y': outputs['anchor'].add_(outputs['shift'])}"
    made = Runner("f@1", Prepared(encode_program(exported.program)), exported.weights, Handler(Code(source), {}))
    assert made.prepared.joinable
    answers = made.answer([{"x": torch.full((1, 3), float(number))} for number in (1, 2, 3)])
    assert [each["y"][0, 0].item() for each in answers] == [12.0, 14.0, 16.0]


class Total(torch.nn.Module):
    def forward(self, x):
        return {"total": x.sum()}


def test_a_handler_may_write_to_an_output_without_dimensions():
    exported = export(Total().eval(), {"x": torch.zeros(2, 3)}, {"x": {0: "batch"}})
    source = "def postprocess(outputs, inputs, state): return {'total': outputs['total'].add_(1)}"
    made = Runner("f@1", Prepared(encode_program(exported.program)), exported.weights, Handler(Code(source), {}))
    answers = made.answer([{"x": torch.full((1, 3), float(number))} for number in (1, 2)])
    assert [each["total"].item() for each in answers] == [4.0, 7.0]


ODD = """
class Odd(Exception):
    def __str__(self):
        {text}
def preprocess(inputs, state):
    if inputs["x"].sum() == 0:
        raise Odd
    return inputs
"""


FORMATTED = "return type('T', (str,), {'__format__': None})('x')"


@pytest.mark.parametrize("text", ["return self.text", "raise self", "return 3", FORMATTED])
def test_an_error_without_a_text_fails_its_own_request_only(text):
    good, bad = sums(ODD.format(text=text)).answer([{"x": torch.ones(1, 3)}, {"x": torch.zeros(1, 3)}])
    assert good["y"].tolist() == [[3.0]]
    assert bad.error == "HandlerError"
    assert "Odd" in bad.message
    assert "raise Odd" in bad.message


PANICS = """
class PanicException(BaseException):
    pass
def panic(told):
    raise PanicException("an index is out of range") if told else KeyboardInterrupt
"""


@pytest.mark.parametrize("step", ["preprocess(inputs, state)", "postprocess(outputs, inputs, state)"])
def test_a_panic_of_a_library_in_rust_fails_its_own_request_only(step):
    answers = "inputs" if step.startswith("pre") else "outputs"
    source = f"{PANICS}def {step}: return panic(True) if inputs['x'].sum() == 0 else {answers}"
    good, bad = sums(source).answer([{"x": torch.ones(1, 3)}, {"x": torch.zeros(1, 3)}])
    assert good["y"].tolist() == [[3.0]]
    assert bad.error == "HandlerError"
    assert "PanicException: an index is out of range" in bad.message


@pytest.mark.parametrize("source", ["panic(True)", "def setup(assets): panic(True)"])
def test_a_panic_of_a_library_in_rust_fails_the_bind(source):
    with pytest.raises(HandlerError, match="could not be set up: PanicException"):
        Handler(Code(PANICS + source), {})


def test_a_deployer_can_interrupt_its_trial_of_a_handler():
    handler = Handler(Code(f"{PANICS}def preprocess(inputs, state): panic(False)"), {})
    with pytest.raises(KeyboardInterrupt):
        handler.preprocess({})
    with pytest.raises(KeyboardInterrupt):
        Handler(Code(f"{PANICS}panic(False)"), {})


INDESCRIBABLE = {
    "name of a class": """
class Meta(type):
    @property
    def __name__(cls): raise OSError
class Odd(metaclass=Meta): pass
def odd(): return Odd()
""",
    "traceback": """
class Odd(Exception):
    @property
    def __traceback__(self): raise OSError
def odd(): raise Odd
""",
    "key": """
class Text(str):
    def encode(self, **how): raise OSError
class Key:
    def __repr__(self): return Text("k")
def odd(): return {Key(): 1}
""",
}


@pytest.mark.parametrize("step", ["preprocess(inputs, state)", "postprocess(outputs, inputs, state)"])
@pytest.mark.parametrize("what", INDESCRIBABLE)
def test_a_result_or_error_that_cannot_be_described_fails_its_own_request_only(what, step):
    answers = "inputs" if step.startswith("pre") else "outputs"
    source = f"{INDESCRIBABLE[what]}def {step}: return odd() if inputs['x'].sum() == 0 else {answers}"
    good, bad = sums(source).answer([{"x": torch.ones(1, 3)}, {"x": torch.zeros(1, 3)}])
    assert good["y"].tolist() == [[3.0]]
    assert bad.error == "HandlerError"


def copied_bytes(monkeypatch, source) -> int:
    """Return the bytes that a shared run of two requests copies for a handler."""
    copied = []
    runner, clone = sums(source), torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **how: copied.append(self.nbytes) or clone(self, **how))
    answers = runner.answer([{"x": torch.ones(1, 3)}, {"x": torch.ones(1, 3)}])
    assert len(answers) == 2
    return sum(copied)


HALVES = {
    "preprocess": ("def preprocess(inputs, state): return inputs", 2 * 12),
    "postprocess": ("def postprocess(outputs, inputs, state): return outputs", 2 * 4),
    "neither": ("", 0),
    "too large": ("def postprocess(outputs, inputs, state): return {'y': outputs['y'].expand(1 << 31)}", 0),
}


@pytest.mark.parametrize("half", HALVES)
def test_a_shared_run_copies_only_what_a_handler_makes_and_may_send(monkeypatch, half):
    source, nbytes = HALVES[half]
    assert copied_bytes(monkeypatch, source) == nbytes


REPEATED = """
large = bytes(1 << 20)
def postprocess(outputs, inputs, state):
    return {"text": [large] * (65 if inputs["x"].sum() == 0 else 1)}
"""


@pytest.mark.parametrize("declared", [(), (TensorSpec("text", "BYTES", ("found",)),)])
def test_a_request_for_which_a_handler_returns_one_large_element_many_times_fails_alone(declared, monkeypatch):
    def refused(elements):
        raise MemoryError

    monkeypatch.setattr(values, "pack_bytes", refused)
    exported = export(Sums().eval(), {"x": torch.zeros(2, 3)}, {"x": {0: "batch"}})
    prepared = Prepared(encode_program(exported.program))
    runner = Runner("f@1", prepared, exported.weights, Handler(Code(REPEATED), {}), declared)
    good, bad = runner.answer([{"x": torch.ones(1, 3)}, {"x": torch.zeros(1, 3)}])
    assert [each.meta.nbytes for each in encode_outputs(good)] == [4 + (1 << 20)]
    with pytest.raises(HandlerError, match=str(65 * (4 + (1 << 20)))):
        encode_outputs(bad)


def test_requests_that_cannot_be_joined_run_alone(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("can't allocate memory")

    runner = sums("")
    monkeypatch.setattr(torch, "cat", failing)
    answers = runner.answer([{"x": torch.full((1, 3), float(number))} for number in (1, 2)])
    assert [each["y"].tolist() for each in answers] == [[[3.0]], [[6.0]]]


SOURCES = {
    "dataclass": """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class S:
    w: dict
""",
    "hints": """
import typing
class Q: pass
class S:
    n: "Q"
typing.get_type_hints(S)
""",
    "pickle": """
import pickle
class Q: pass
def setup(assets): return pickle.loads(pickle.dumps(Q()))
""",
    "msgspec": """
from __future__ import annotations
import msgspec
class R(msgspec.Struct):
    a: list[Q]
class Q(msgspec.Struct):
    b: int
def setup(assets): return msgspec.json.decode(b'{"a": [{"b": 1}]}', type=R)
""",
}


def test_a_handler_may_change_the_name_of_its_module():
    gc.collect()
    before = set(sys.modules)
    handler = Handler(Code("__name__ = 'json'"), {})
    del handler
    with pytest.raises(HandlerError, match="mine"):
        Handler(Code("__name__ = 'json'; raise OSError('mine')"), {})
    gc.collect()
    assert set(sys.modules) == before


def test_an_asset_that_several_binds_read_at_the_same_time_is_kept_once():
    assets, barrier = Assets(), threading.Barrier(8, timeout=60)

    def make() -> object:
        barrier.wait()
        return object()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for number in range(200):
                read = [threads.submit(assets.read, "a", str(number), make) for _ in range(8)]
                assert len({each.result() for each in read}) == 1
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("source", SOURCES)
def test_a_handler_defines_classes_as_a_module_does(source):
    def modules() -> set[str]:
        return {name for name in sys.modules if name.startswith("handler")}

    gc.collect()
    before = modules()
    one, other = (Handler(Code(SOURCES[source]), {}) for _ in range(2))
    assert len(modules() - before) == 2
    del one, other
    gc.collect()
    assert modules() == before

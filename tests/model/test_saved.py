"""A `.pt2` file of another author is data or is refused: no code in it runs."""

import io
import json
import operator
import pathlib
import pickle
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from overwinter.core.errors import ProgramError
from overwinter.model.export import export_saved
from overwinter.model.graph import guard_calls

Records = dict[str, bytes]
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
GRAPH = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"


class Net(torch.nn.Module):
    """A model with a weight, a constant and a computed size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.fixed = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[: x.shape[0] // 2] + self.fixed


class Touch:
    """An object whose pickle creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (self.marker,)


def saved(net: torch.nn.Module, path: Path, **options: Any) -> Path:
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(net.eval(), (torch.randn(6, 4),), dynamic_shapes=sizes, strict=False)
    torch.export.save(exported, path, **options)
    return path


@pytest.fixture(scope="module")
def benign(tmp_path_factory: pytest.TempPathFactory) -> Records:
    path = saved(Net(), tmp_path_factory.mktemp("saved") / "net.pt2")
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(records: Records, path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(f"net/{name}", content)
    return path


def edited(record: str, edit: Callable[[Any, str], None]) -> Callable[[Records, Path], None]:
    """Return a function that changes a record of JSON."""

    def change(records: Records, marker: Path) -> None:
        document = json.loads(records[record])
        edit(document, f"__import__('pathlib').Path({str(marker)!r}).touch()")
        records[record] = json.dumps(document).encode()

    return change


def replaced(record: str, *, by_torch: bool) -> Callable[[Records, Path], None]:
    """Return a function that replaces a record by a pickle that has an effect."""

    def change(records: Records, marker: Path) -> None:
        content = io.BytesIO()
        torch.save(Touch(marker), content)
        records[record] = content.getvalue() if by_torch else pickle.dumps(Touch(marker))

    return change


def both(*changes: Callable[[Records, Path], None]) -> Callable[[Records, Path], None]:
    def change(records: Records, marker: Path) -> None:
        for each in changes:
            each(records, marker)

    return change


def pickled(config: str, path_name: str) -> Callable[[Records, Path], None]:
    """Return a function that lets a configuration name a pickle."""

    def point(document: Any, code: str) -> None:
        first = next(iter(document["config"].values()))
        first |= {"path_name": path_name, "use_pickle": True}

    directory = config.rpartition("/")[0]
    return both(edited(config, point), replaced(f"{directory}/{path_name}", by_torch="opaque" not in path_name))


def expression(document: Any, code: str) -> None:
    values = document["graph_module"]["graph"]["sym_int_values"]
    next(value for value in values.values() if "as_expr" in value)["as_expr"]["expr_str"] = code


def spelled(document: Any, code: str) -> None:
    """From the text of sympy's functions an expression spells code that imports a module, and sympy evaluates it."""
    names: dict[str, Any] = {}
    exec("from sympy import *", names)
    letters: dict[str, str] = {}
    for function in ("srepr", "dotprint", "mathml", "latex", "python"):
        for at, letter in enumerate(names[function](names["Symbol"]("math"))):
            letters.setdefault(letter, f"math.replace(sympify,{function})[{at}]")
    text = "+".join(letters[letter] for letter in "__import__('hostile_code')")
    expression(document, f"math.subs(math,{text})")


def guard(document: Any, code: str) -> None:
    document["guards_code"] = [code]


def renamed(document: Any, code: str) -> None:
    """The input's name becomes an argument with a default, in the source that PyTorch makes."""
    name = json.dumps(f"x=({code},)")
    text = json.dumps(document).replace('{"name": "x"}', f'{{"name": {name}}}').replace('"x": {', f"{name}: {{")
    document |= json.loads(text)


def attribute(document: Any, code: str) -> None:
    """The name of a constant ends the quotes in which PyTorch writes it."""
    specs = document["graph_module"]["signature"]["input_specs"]
    named = next(spec["tensor_constant"] for spec in specs if "tensor_constant" in spec)
    named["tensor_constant_name"] = f'fixed-"), {code}, ("'


def targeting(target: str) -> Callable[[Records, Path], None]:
    def change(document: Any, code: str) -> None:
        for node in document["graph_module"]["graph"]["nodes"]:
            node["target"] = target

    return edited(GRAPH, change)


def sourced(document: Any, code: str) -> None:
    """PyTorch looks up the source of a call; the last name loads a library."""
    for node in document["graph_module"]["graph"]["nodes"]:
        node["metadata"]["source_fn_stack"] = "linear,torch.ctypes.cdll./hostile/library"


def passing_operator(document: Any, code: str) -> None:
    argument = {"name": "", "arg": {"as_operator": "torch.ops.aten.from_file.default"}, "kind": 1}
    document["graph_module"]["graph"]["nodes"][0]["inputs"].append(argument)


def imported(document: Any, code: str) -> None:
    """The form of the inputs names a module, which PyTorch imports."""
    call = document["graph_module"]["module_call_graph"][0]["signature"]
    protocol, form = json.loads(call["in_spec"])
    named = json.dumps({"__enum__": True, "fqn": "hostile_code", "name": "x"})
    call["in_spec"] = json.dumps([protocol, form | {"context": f"[{named}]", "type": "builtins.dict"}])


def defaulted(document: Any, code: str) -> None:
    """The form of the outputs names a module with a factory, which PyTorch imports."""
    call = document["graph_module"]["module_call_graph"][0]["signature"]
    protocol, form = json.loads(call["out_spec"])
    factory = {"default_factory_module": "hostile_code", "default_factory_name": "pathlib", "dict_context": ["y"]}
    leaf = {"type": None, "context": None, "children_spec": []}
    form = {"type": "collections.defaultdict", "context": factory, "children_spec": [leaf]}
    call["out_spec"] = json.dumps([protocol, form])


def second_model(records: Records, marker: Path) -> None:
    for record in (WEIGHTS, CONSTANTS, GRAPH, SAMPLES):
        records[record.replace("model_", "other_").replace("model.", "other.")] = records[record]
    replaced("data/sample_inputs/other.pt", by_torch=True)(records, marker)


RUN = {
    "samples": replaced(SAMPLES, by_torch=True),
    "samples by pickle": replaced(SAMPLES, by_torch=False),
    "weight": pickled(WEIGHTS, "weight_0"),
    "constant": pickled(CONSTANTS, "tensor_0"),
    "opaque constant": pickled(CONSTANTS, "opaque_obj_0"),
    "older weights": replaced("data/weights/model.pt", by_torch=True),
    "older constants": replaced("data/constants/model.pt", by_torch=True),
    "second model": second_model,
    "expression": edited(GRAPH, expression),
    "spelled expression": edited(GRAPH, spelled),
    "name": edited(GRAPH, renamed),
    "import": edited(GRAPH, imported),
    "import of a factory": edited(GRAPH, defaulted),
    "guard": edited(GRAPH, guard),
}
"""Files that run code when PyTorch opens them."""


def compiled(records: Records, marker: Path) -> None:
    records["data/aotinductor/model/model.so"] = b"ELF"


def empty(document: Any, code: str) -> None:
    first = next(iter(document["config"].values()))
    first["tensor_meta"]["sizes"] = [{"as_int": 1 << 40}]


REFUSED = {
    "compiled code": compiled,
    "script object": pickled(CONSTANTS, "custom_obj_0"),
    "attribute": edited(GRAPH, attribute),
    "library": edited(GRAPH, sourced),
    "operator as an argument": edited(GRAPH, passing_operator),
    "function": targeting("torch.os.system"),
    "method": targeting("torch.ops.load_library.__call__"),
    "method of a set": targeting("torch.ops.loaded_libraries.add"),
    "method of operators": targeting("torch.ops.aten.__getattr__.__call__"),
    "function on sizes": targeting("_operator.attrgetter"),
    "tensor without bytes": both(edited(WEIGHTS, empty), lambda records, marker: records.update(NO_BYTES)),
}
"""Files with other things that are not data, which nothing here can run."""
NO_BYTES = {"data/weights/weight_0": b""}


@pytest.mark.parametrize("kind", RUN)
def test_code_that_pytorch_would_run_is_refused_and_never_runs(
    benign: Records, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "hostile_code.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    records = dict(benign)
    RUN[kind](records, marker)
    path = written(records, tmp_path / "evil.pt2")
    with pytest.raises(ProgramError, match=r"evil\.pt2 holds .*--trust"):
        export_saved(path)
    assert not marker.exists()
    # It was worth refusing: PyTorch runs it.
    with suppress(Exception):
        torch.export.load(path).module()(torch.ones(6, 4))
    sys.modules.pop("hostile_code", None)
    assert marker.exists()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_data_is_refused(benign: Records, tmp_path: Path, kind: str) -> None:
    records = dict(benign)
    REFUSED[kind](records, tmp_path / "ran")
    path = written(records, tmp_path / "evil.pt2")
    with pytest.raises(ProgramError, match=r"evil\.pt2 holds .*--trust"):
        export_saved(path)
    assert not (tmp_path / "ran").exists()


def test_the_refusal_of_a_name_says_which_characters_names_may_have(tmp_path: Path) -> None:
    net = torch.nn.Sequential()
    net.add_module("a,b", torch.nn.Linear(4, 4))
    path = saved(net, tmp_path / "net.pt2")
    with pytest.raises(ProgramError, match=r"'a,b.*characters than letters, digits, spaces and \. _ - \+ : /"):
        export_saved(path)


def test_two_archives_in_one_are_refused(benign: Records, tmp_path: Path) -> None:
    """PyTorch's fallback for what it cannot open reads other names with another reader, and unpickles them."""
    marker = tmp_path / "ran"
    path = written(benign, tmp_path / "evil.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("version", ".".join(map(str, torch._export.serde.schema.SCHEMA_VERSION)))
        archive.writestr("serialized_exported_program.json", benign[GRAPH])
        for name in ("constants", "state_dict", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", pickle.dumps(Touch(marker)))
    with pytest.raises(ProgramError, match=r"evil\.pt2"):
        export_saved(path)
    assert not marker.exists()
    with suppress(Exception):
        torch.export.load(path)
    assert marker.exists()


def test_a_file_that_unpacks_to_more_bytes_than_it_has_is_refused(benign: Records, tmp_path: Path) -> None:
    records = benign | {"extra/zeros": bytes(1 << 20)}
    with pytest.raises(ProgramError, match="more bytes than the file has"):
        export_saved(written(records, tmp_path / "bomb.pt2", zipfile.ZIP_DEFLATED))


def test_pickles_of_a_trusted_file_are_opened(benign: Records, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    records = dict(benign)
    RUN["samples"](records, marker)
    with suppress(ProgramError):
        export_saved(written(records, tmp_path / "evil.pt2"), trusted=True)
    assert marker.exists()


class Branching(torch.nn.Module):
    """What a graph may hold: nested graphs, words, infinities, sizes and their conditions, names of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict({"one-1": torch.nn.Linear(4, 4), "two": torch.nn.BatchNorm1d(4)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        torch._check(x.shape[0] % 2 == 0, lambda: "rows (of 'x') come in pairs")
        with torch.no_grad():
            y = self.parts["two"](self.parts["one-1"](x)).masked_fill(x > 1, -float("inf"))
        z = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))
        pairs = torch.einsum("ij,kj->ik", x, x)[: x.shape[0] // 2]
        return {
            "first": y.amax(0),
            "second": z,
            "third": pairs,
            "fourth": torch.nn.functional.gelu(x, approximate="tanh"),
        }


def test_what_pytorch_saves_needs_no_trust(tmp_path: Path) -> None:
    net = Branching()
    program, _ = export_saved(saved(net, tmp_path / "net.pt2"))
    assert len(program.outputs) == 4
    assert {weight.shape for weight in program.weights} >= {(4, 4), (4,)}


def graph(target: Any, *arguments: Any) -> torch.fx.GraphModule:
    made = torch.fx.Graph()
    x = made.placeholder("x")
    made.call_function(target, (x, *arguments))
    made.output(x)
    return torch.fx.GraphModule({}, made)


def test_a_reference_runs_with_the_checks_of_a_program() -> None:
    """A reference, the saved graph that a program is compared with, also accesses no memory outside its tensors."""
    behind = graph(torch.ops.aten._reshape_alias.default, [1000, 4], [4, 1])
    widest = graph(torch.ops.aten.histc.default, 1 << 40)
    for module in (behind, widest):
        guard_calls(module)
        with pytest.raises((RuntimeError, ValueError)):
            module(torch.ones(6, 4))


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (torch.ops.aten.from_file.default, ("made", True, 4)),
        (operator.attrgetter, ("__class__",)),
        (operator.call, ("x",)),
        (operator.setitem, ([0], 0, 1)),
        (torch.ops.higher_order.map_impl, ()),
    ],
)
def test_a_reference_calls_nothing_that_a_program_may_not_call(target: Any, arguments: tuple[Any, ...]) -> None:
    """Also if the result of the call is not used, so that the program leaves the call out."""
    made = torch.fx.Graph()
    made.call_function(target, arguments)
    made.output(None)
    with pytest.raises(ProgramError, match=r"not an operator that a program may call"):
        guard_calls(torch.fx.GraphModule({}, made))


def test_a_reference_calls_no_operator_in_the_place_of_a_nested_graph() -> None:
    from_file = torch.ops.aten.from_file.default
    with pytest.raises(ProgramError, match=r"wrap_with_set_grad_enabled is called with a function"):
        guard_calls(graph(torch.ops.higher_order.wrap_with_set_grad_enabled, False, from_file, "made", True, 4))

"""Checks that a `.pt2` file contains only data.

PyTorch opens such a file by executing parts of it: it unpickles objects, loads compiled code, evaluates expressions of
sizes, and writes names into Python source that it executes. None of that may run code from a third party's file, so an
allow list defines what counts as data, and everything else is refused.

The contents are read with PyTorch's own reader, because two readers may see different contents of one archive.
"""

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export.pt2_archive import PT2ArchiveReader

from overwinter.core.errors import ProgramError

MODELS, WEIGHTS, CONSTANTS, SAMPLES = "models/", "data/weights/", "data/constants/", "data/sample_inputs/"
COMPILED = "data/aotinductor/"

_NAME = re.compile(r"[\w.]*")
"""Text that has no effect in Python source."""
_NAMES = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
_PLAIN = {
    **dict.fromkeys(_NAMES, re.compile(r"[\w.:/ +-]*")),
    **dict.fromkeys(("as_float", "as_floats"), re.compile(r"-?Infinity|NaN")),
    "torch_version": re.compile(r"[\w.+]*"),
}
"""The graph's strings that may contain more than names; in Python source the names of tensors occur only in quotes.
"""
_NOTES = {"stack_trace", "nn_module_stack", "torch_fn", "from_node", "custom"}
"""The kinds of call metadata that PyTorch does not evaluate. It does look up the names in `source_fn_stack`."""
_OPERATOR = re.compile(r"torch\.ops\.((?!__)\w+)\.(\w+)(?:\.(\w+))?")
_ON_SIZES = re.compile(
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|not_|mul|add|sub|floordiv|truediv|mod|pow|and_|or_|lshift|rshift)"
    r"|math\.(trunc|ceil|floor|sqrt|log2)|torch\.(sym_\w+|_sym_\w+)"
)
"""The functions that a graph may call on sizes."""
_FUNCTIONS = {
    *("Add", "Mul", "Pow", "Integer", "Rational", "Float", "Mod", "Max", "Min", "Abs", "floor", "ceiling"),
    *("Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"),
    *("Eq", "Ne", "Ge", "Le", "Gt", "Lt", "And", "Or", "Not", "Piecewise", "ExprCondPair", "sqrt", "log", "exp"),
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift"),
    *("RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt"),
    *("RoundDecimal", "ToFloat", "Identity", "IsNonOverlappingAndDenseIndicator", "max", "min", "abs"),
}
"""The functions that an expression of sizes may call, in addition to `Symbol`."""
_FORMS = {
    *("builtins.tuple", "builtins.list", "builtins.dict"),
    *("collections.namedtuple", "collections.OrderedDict", "collections.deque"),
}
"""The types that inputs and outputs may have. For a `defaultdict` PyTorch would import the module of its factory."""
_SYMBOL = re.compile(r"z?[suf]\d+|zuf\d+|true|false|oo|int_oo|nan")
"""The names of sizes and of constants in an expression of sizes."""
_SIZES = {"size", "stride", "storage_offset", "dim", "numel"}
"""What a guard may read of an input."""
_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.Load),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
NAMED = "a name of a weight or module with other characters than letters, digits, spaces and . _ - + : /"
EXPONENT_MOST = 64
TEXT_MOST = 10_000


def check_saved(path: Path) -> None:
    """Raise ProgramError with the finding, unless opening the file executes nothing from the file."""
    for place, what in _findings(path):
        raise ProgramError(
            f"{path.name} holds {what} ({place}): opening it may run code that comes with the file. Save the program "
            "again, by torch.export.save, with plain tensors only; or, if you trust its author, deploy it with --trust"
        )


def _findings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the position and the kind of anything in the file that is not data."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as older:
            # The old format, which PyTorch reads in another way if it cannot open the file in the new one.
            if "version" in older.namelist():
                yield "version", "pickles in the format of an older PyTorch"
    reader = PT2ArchiveReader(str(path))
    names = reader.get_file_names()
    if sum(reader.archive_file.get_record_size(name) for name in names) > path.stat().st_size:
        yield "all of it", "more bytes than the file has, which PyTorch never writes"
    for name in names:
        if name.startswith(COMPILED):
            yield name, "compiled code"
        elif name.startswith(MODELS):
            yield from _of_model(reader, name, names)


def _of_model(reader: PT2ArchiveReader, name: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    model = name[len(MODELS) : -len(".json")]
    yield from _of_graph(name, _json(reader, name))
    yield from _of_samples(reader, f"{SAMPLES}{model}.pt")
    for directory, kind, prefix in ((WEIGHTS, "weights", "weight_"), (CONSTANTS, "constants", "tensor_")):
        if f"{directory}{model}.pt" in names:
            yield f"{directory}{model}.pt", "pickles in the format of an older PyTorch"
        yield from _of_tensors(reader, f"{directory}{model}_{kind}_config.json", directory, prefix)


def _json(reader: PT2ArchiveReader, name: str) -> Any:
    return json.loads(reader.read_bytes(name))


def _of_tensors(reader: PT2ArchiveReader, config: str, directory: str, prefix: str) -> Iterator[tuple[str, str]]:
    for name, payload in _json(reader, config)["config"].items():
        place, record = f"{config}: {name}", payload["path_name"]
        if payload["use_pickle"] is not False or not record.startswith(prefix):
            yield place, "a pickled object"
        elif not _PLAIN["fqn"].fullmatch(name):
            yield place, "an invalid name"
        elif not reader.archive_file.get_record_size(directory + record) and _count(payload["tensor_meta"]):
            yield place, "a tensor without its bytes"


def _count(meta: Mapping[str, Any]) -> int:
    return prod(size.get("as_int", 1) for size in meta["sizes"])


def _of_samples(reader: PT2ArchiveReader, name: str) -> Iterator[tuple[str, str]]:
    content = reader.read_bytes(name)
    if not content:
        return
    try:
        samples = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # noqa: BLE001 - after any error PyTorch would unpickle the whole file
        yield name, "sample inputs that are more than tensors"
    else:
        yield from ((name, f"an input named {key!r}") for key in _keys(samples) if not _NAME.fullmatch(str(key)))


def _keys(value: Any) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from _keys(part)
    elif isinstance(value, str):
        yield value


def _of_graph(name: str, document: Any) -> Iterator[tuple[str, str]]:
    for path, text in _texts(document):
        if not _is_data(path, text):
            what = NAMED if path[-1] in _NAMES else "which is not plain data"
            yield f"{name}: {'.'.join(path[-3:])}", f"{text[:80]!r}, {what}"


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every string with its position, the keys that lead to it; the position of a key ends in "key"."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield (*path, "key"), key
            yield from _texts(part, (*path, key))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, path)


def _is_data(path: Sequence[str], text: str) -> bool:
    key = path[-1]
    before = tuple(path[-3:-1])
    if key in _NOTES and before[-1:] == ("metadata",):
        return True
    if key in ("as_string", "as_strings") and before == ("inputs", "arg"):
        # In the Python source such an argument of a call is a quoted string.
        return True
    if path[0] == "guards_code":
        return _is_arithmetic(text)
    if key == "expr_str" or tuple(path) == ("range_constraints", "key"):
        return _is_arithmetic(text) and _is_symbolic(text)
    if key == "source_fn_stack" and before[-1:] == ("metadata",):
        return all(_is_source(source.rpartition(",")[2]) for source in text.split(";"))
    if key == "as_operator":
        # Only calls that a program cannot make take an operator as an argument.
        return False
    if key == "target":
        return _is_operator(text)
    if key in ("in_spec", "out_spec"):
        return _is_spec(text)
    return _PLAIN.get(key, _NAME).fullmatch(text) is not None


def _is_operator(text: str) -> bool:
    """Whether a call's target names an operator or a function on sizes; PyTorch would call any attribute so named."""
    found = _OPERATOR.fullmatch(text)
    if found is None:
        return _ON_SIZES.fullmatch(text) is not None
    target: Any = torch.ops
    for name in filter(None, found.groups()):
        target = getattr(target, name, None)
        if target is None:
            # The operator of a library that is missing here, which PyTorch refuses.
            return True
    return isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def _is_source(text: str) -> bool:
    """Whether looking up the function or class that made a call has no effect. PyTorch reads one attribute after
    another, and some objects load a library when an attribute is read.
    """
    first, *names = text.split(".")
    if not first.startswith("torch"):
        return not text.startswith("#") and (len(names) == 1 or not first.startswith(("_operator", "math")))
    found: Any = torch
    for name in names:
        if found is torch.ops:
            return True
        is_module = isinstance(found, ModuleType) and found.__name__.partition(".")[0] == "torch"
        if not (is_module or isinstance(found, type)) or name not in vars(found):
            return False
        found = vars(found)[name]
    return True


def _is_spec(text: str) -> bool:
    """Whether the form of inputs or outputs contains only names; its strings may contain JSON."""
    if _NAME.fullmatch(text):
        # This name makes PyTorch import a module that the text names.
        return text != "__enum__"
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return content != text and all(
        part in _FORMS if path[-1:] == ("type",) else _is_spec(part) for path, part in _texts(content)
    )


def _is_arithmetic(text: str) -> bool:
    """Whether Python code computes with numbers and sizes, and does nothing else."""
    try:
        return text.isascii() and len(text) <= TEXT_MOST and _computes(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _is_symbolic(text: str) -> bool:
    """Whether the names in arithmetic are only sizes, constants and called functions. sympy evaluates the arithmetic.
    It reads other names as functions of its own or of Python, or as symbols (such as `math`), whose methods evaluate
    text.
    """
    tree = ast.parse(text.strip(), mode="eval")
    called = {id(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    return not any(
        isinstance(each, ast.Attribute | ast.Subscript)
        or (isinstance(each, ast.Name) and id(each) not in called and not _SYMBOL.fullmatch(each.id))
        for each in ast.walk(tree)
    )


def _computes(tree: ast.AST) -> bool:
    match tree:
        case ast.Constant(value):
            return isinstance(value, int | float)
        case ast.Name(name):
            return name.isidentifier() and not name.startswith("_")
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str() as name)], options):
            return _NAME.fullmatch(name) is not None and all(map(_is_flag, options))
        case ast.Call(ast.Name("Float"), [ast.Constant(str() as digits)], options):
            return re.fullmatch(r"[\d.e+-]*", digits) is not None and all(
                option.arg == "precision" and isinstance(option.value, ast.Constant) for option in options
            )
        case ast.Call(ast.Name(name), parts, []):
            return name in _FUNCTIONS and all(map(_computes, parts))
        case ast.Call(ast.Attribute(ast.Name("math"), name), parts, []):
            return not name.startswith("_") and all(map(_computes, parts))
        case ast.Call(ast.Attribute(source, name), parts, []):
            return name in _SIZES and _is_input(source) and all(map(_computes, parts))
        case ast.Subscript(ast.Call() as sizes, ast.Constant(int())):
            return _computes(sizes)
        case ast.BinOp(_, ast.Pow(), power) if not _is_small(power):
            return False
        case _:
            return isinstance(tree, _ARITHMETIC) and all(map(_computes, ast.iter_child_nodes(tree)))


def _is_flag(option: ast.keyword) -> bool:
    return isinstance(option.value, ast.Constant) and isinstance(option.value.value, bool)


def _is_small(power: ast.expr) -> bool:
    return isinstance(power, ast.Constant) and isinstance(power.value, int) and power.value <= EXPONENT_MOST


def _is_input(source: ast.expr) -> bool:
    """Whether an expression is an input, as the guards of an export name it."""
    match source:
        case ast.Name("L" | "flat_args" | "args"):
            return True
        case ast.Subscript(inner, ast.Constant(str() | int() as key)):
            return _NAME.fullmatch(str(key)) is not None and _is_input(inner)
        case _:
            return False

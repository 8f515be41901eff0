"""Opens the SOURCE of `overwinter deploy SOURCE`.

    `module:callable`     called without arguments; returns (module, example_inputs[, dynamic])
    `model.pt2`           written by torch.export.save
    a directory           written by save_pretrained of transformers; with a task, the function gets a handler

The code of a module runs here, on the author's own machine. This module imports PyTorch.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import AuthorError, CallerError
from overwinter.model.arguments import Dynamic

RETURNS = "(module, example_inputs) or (module, example_inputs, dynamic)"


class Opened(NamedTuple):
    """A model with the other arguments of its export."""

    module: torch.nn.Module
    example_inputs: Any
    dynamic: Dynamic | None = None


def open_source(
    source: str, directory: Path, task: str | None = None, options: Mapping[str, Any] | None = None
) -> Opened | Path:
    """Open the model that `source` names; for a `.pt2` file or a directory of `transformers` return the path.

    Modules are searched for in `directory` first. `task` and `options` apply to a directory of `transformers`. Raises
    CallerError if `source` names nothing, or if one of these two is given and `source` is no directory; AuthorError if
    the author's code fails.
    """
    path = directory / source
    if path.is_dir():
        return path
    if task is not None or options:
        if not path.exists() and ":" not in source:
            raise CallerError(f"there is no directory {path}")
        raise CallerError(f"a task and its options need a directory of transformers, and {source!r} is not one")
    if path.suffix == ".pt2":
        if not path.is_file():
            raise CallerError(f"there is no file {path}")
        return path
    module, mark, name = source.partition(":")
    dotted = os.path.relpath(directory / module, directory).removesuffix(".py").replace("/", ".")
    if not (mark and module and name):
        others = "a .pt2 file, nor a directory, nor the .toml file of a pipeline"
        hint = f"; write {dotted}:CALLABLE" if module.endswith(".py") and not dotted.startswith(".") else ""
        raise CallerError(f"{source!r} is neither module:callable, nor {others}{hint}")
    if dotted.startswith("."):
        raise CallerError(f"{module!r} is outside of {directory}: run the command there, or write the name of a module")
    if dotted != module:
        raise CallerError(f"{module!r} is a path, not the name of a module; write {dotted}:{name}")
    return _called(source, _found(module, name, directory))


def _found(module: str, name: str, directory: Path) -> Callable[[], Any]:
    sys.path.insert(0, str(directory))
    try:
        value: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise AuthorError(f"{module} cannot be imported: {error}{_line(error)}") from error
        raise CallerError(f"there is no module {module!r} in {directory} or on Python's path") from error
    except Exception as error:  # the author's code may raise anything
        raise AuthorError(f"{module} cannot be imported: {_words(error)}{_line(error)}") from error
    try:
        for part in name.split("."):
            value = getattr(value, part)
    except AttributeError as error:
        raise CallerError(f"{module} has no {name!r}: {error}{_line(error)}") from error
    except Exception as error:  # a property or a function `__getattr__` of the author may raise anything
        raise AuthorError(f"{module}:{name} cannot be read: {_words(error)}{_line(error)}") from error
    if not callable(value):
        raise CallerError(f"{module}:{name} is of type {type(value).__name__}, not a function that returns {RETURNS}")
    return value  # type: ignore[no-any-return]


def _called(source: str, make: Callable[[], Any]) -> Opened:
    try:
        made = make()
    except Exception as error:  # the author's code may raise anything
        raise AuthorError(f"{source} failed: {_words(error)}{_line(error)}") from error
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module)):
        raise AuthorError(f"{source} must return {RETURNS}; it returned {_described(made)}")
    return Opened(*made)


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


def _words(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _line(error: Exception) -> str:
    """Return the innermost line of the author's code in the traceback."""
    outside = (__file__, torch.__file__.removesuffix("__init__.py"), "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(outside)]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""

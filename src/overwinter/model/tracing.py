"""Traces a module by `torch.export`, and converts its failures to messages.

Dynamic sizes are left to the exporter, which records its assumptions about them as guards.
"""

import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses import FakeTensor
from torch.export import Dim, ExportedProgram

from overwinter.core.errors import ProgramError
from overwinter.model.arguments import Arguments, SizeRanges
from overwinter.model.remedies import failure_remedy, no_cache
from overwinter.model.restoring import restored

CheckMessages = dict[sympy.Expr, str | None]
"""The author's message of each `torch._check`, by its condition; None without a message."""


class Traced(NamedTuple):
    """An exported graph, and the author's messages for its conditions."""

    exported: ExportedProgram
    messages: CheckMessages


def trace(module: torch.nn.Module, arguments: Arguments, ranges: SizeRanges) -> Traced:
    """Export the module's graph, with the named sizes of its inputs dynamic within `ranges`; the module is not
    changed.
    """
    sizes = {label: Dim.AUTO(min=low, max=high) for label, (low, high) in ranges.items()}
    shapes = {name: {dim: sizes[label] for dim, label in dims.items()} for name, _, dims in arguments.inputs}
    args, kwargs = arguments.filled(arguments.examples)
    given = ", ".join(
        f"{name} [{', '.join(str(dims.get(dim, size)) for dim, size in enumerate(tensor.shape))}]"
        for name, tensor, dims in arguments.inputs
    )
    with (
        as_program_error(
            "the model cannot be exported", f"; the example inputs are {given}: are these the model's shapes?"
        ),
        torch.no_grad(),
        restored(module),
        no_cache(module),
        _collected_messages() as messages,
    ):
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=arguments.arranged(shapes), strict=False)
        _check_buffers(module)
    return Traced(exported, messages)


def _check_buffers(module: torch.nn.Module) -> None:
    """Raise ProgramError if the trace created a buffer in the module, because the exporter does not record it."""
    for name, buffer in module.named_buffers():
        if isinstance(buffer, FakeTensor):
            raise ProgramError(
                f"the model creates its buffer {name!r} while it runs, which cannot be exported; create it in __init__ "
                "or keep it in a plain attribute"
            )


@contextmanager
def as_program_error(what: str, doubt: str = "") -> Iterator[None]:
    """Turn any exception of the model's code, or of opening a file, into a ProgramError, with the line at fault if
    it is known.

    `doubt` ends the message if an operator may have refused its arguments and no remedy is known.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    stderr = io.StringIO()
    try:
        # On an error the exporter prints its incomplete graph.
        with redirect_stderr(stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(stderr.getvalue())
    except ProgramError:
        raise
    except Exception as error:
        known = _known_error(error)
        failure = f"{known or _first_line(error)}{_user_line(error)}"
        # Errors of the exporter itself have their own classes.
        doubted = doubt if not known and type(error) in (RuntimeError, IndexError, ValueError) else ""
        raise ProgramError(f"{what}: {failure}{failure_remedy(failure) or doubted}") from error
    finally:
        logging.disable(disabled)


def _known_error(error: Exception) -> str:
    """Return the error in one sentence with the remedy; empty if it is not known."""
    found = ((re.search(pattern, str(error).strip()), text) for pattern, text in _KNOWN_ERRORS)
    return next((match.expand(text) for match, text in found if match), "")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0].strip()[:_LONGEST] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_LONGEST = 300
"""The most characters of an error's first line that are reported."""

_KNOWN_ERRORS: tuple[tuple[str, str], ...] = (
    (
        r"Could not (?:guard on|extract specialized integer from) data-dependent expression (?P<what>.+?)(?: \(|$)",
        r"it branches on the values of a tensor, which a program cannot; use torch.where, or compute both branches",
    ),
    (
        r"Found <class '(?P<what>[^']+)'> in output, which is not a known type",
        r"it returns a \g<what>; return tensors, or tuples, lists and dictionaries of tensors",
    ),
    (
        r"\.numpy\(\) is not supported",
        r"it uses NumPy, which a program cannot; use PyTorch's own operators",
    ),
)


_NOT_THE_AUTHORS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path(traceback.__file__).parent / "contextlib"),
    "<",
)


def _user_line(error: Exception) -> str:
    """Return the innermost line outside of PyTorch and of this package that led to the error; empty if none did."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith(_NOT_THE_AUTHORS)]
    return _location(frames[-1]) if frames else ""


@contextmanager
def _collected_messages() -> Iterator[CheckMessages]:
    """Collect the symbolic conditions that the author's code passes to `torch._check` in this block, with its messages,
    which the exporter drops.
    """
    messages: CheckMessages = {}
    check = torch._check_with

    def recording(error_type: Any, cond: Any, message: Any) -> None:
        # The frame above is `torch._check`; the next one is its caller.
        caller = sys._getframe(2).f_code.co_filename
        if isinstance(cond, torch.SymBool) and not caller.startswith(_NOT_THE_AUTHORS):
            messages[cond.node.expr] = str(message()) if callable(message) else None
        check(error_type, cond, message)

    torch._check_with = recording
    try:
        yield messages
    finally:
        torch._check_with = check


def fixing_line(tensor: torch.Tensor, name: str, dim: int) -> str:
    """Return the line that fixed a size of the input `name`, given its symbolic tensor; empty if unknown."""
    place = f"L_{name}_size_{dim}_"
    sizes: Any = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    for symbol, location in getattr(sizes, "replacements_slocs", {}).items():
        sources = [
            source.name if isinstance(source.name, str) else source.name() for source in sizes.var_to_sources[symbol]
        ]
        frame = location.maybe_user_loc or location.framework_loc
        if any(re.sub(r"\W+", "_", source) == place for source in sources) and not isinstance(frame, str | None):
            return "" if frame.filename.startswith(_NOT_THE_AUTHORS) else _location(frame)
    return ""


def _location(frame: traceback.FrameSummary) -> str:
    return f" ({frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"

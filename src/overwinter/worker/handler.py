"""Executes a function's handler. On a node this happens only in the sandbox of a worker; a deployer tries the handlers
of tasks (`tasks/`) on its own machine.
"""

import inspect
import linecache
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

from overwinter.core.errors import CallerError, HandlerError
from overwinter.core.ids import Address
from overwinter.worker.values import Value, plain

Step = Callable[..., Any]
FILENAME = "handler.py"
FAILURES = BaseException
"""What the author's code may fail with. The worker must survive SystemExit, too, and the panics of libraries in Rust
(`PanicException`), which have no other public class.
"""


class Code:
    """A family's source, compiled once. Each function of the family executes it in a separate module."""

    def __init__(self, source: str) -> None:
        """Compile the source; raise HandlerError if it is not valid Python."""
        # Give `linecache` the source, so that a traceback shows the author's lines, which are in no file here.
        linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
        try:
            self._code = compile(source, FILENAME, "exec")
        except FAILURES as error:
            raise _not_set_up(error) from error

    def execute(self) -> ModuleType:
        """Execute the code in a new module, and return it. The caller removes it from `sys.modules`."""
        module = ModuleType("handler")
        # Dataclasses and others look up the module of a class by its name.
        name = module.__name__ = _registered_name(module)
        sys.modules[name] = module
        try:
            exec(self._code, module.__dict__)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module


def _registered_name(module: ModuleType) -> str:
    """Return the module's name in `sys.modules`. Its code may change `__name__`."""
    return f"handler_{id(module):x}"


class Asset:
    """One of a handler's files, in the form that `setup` receives."""

    def __init__(self, value: object) -> None:
        self.value = value


Read = Callable[[str, Callable[[], object]], Asset]
"""Returns the cached result for the asset of this name, or makes it."""


class Assets:
    """The results of `read_asset` for a family, by name and address, as long as one of its functions uses them."""

    def __init__(self) -> None:
        self._read: WeakValueDictionary[tuple[str, Address], Asset] = WeakValueDictionary()
        self._lock = threading.Lock()

    def read(self, name: str, address: Address, make: Callable[[], object]) -> Asset:
        """Return the earlier result for this file, or that of `make`."""
        found = self._read.get((name, address))
        if found is None:
            made = Asset(make())
            # Two binds may make it at the same time: both get the first.
            with self._lock:
                found = self._read.setdefault((name, address), made)
        return found


def unshared(name: str, make: Callable[[], object]) -> Asset:
    """Return an asset that is not shared with other functions."""
    return Asset(make())


class Handler:
    """One function's handler: `preprocess(inputs, state)` before the program, `postprocess(outputs, inputs, state)`
    after it.
    """

    def __init__(self, code: Code, assets: Mapping[str, bytes], read: Read = unshared) -> None:
        """Execute the code and call its `setup` with the assets; raise HandlerError if the code fails, or defines a
        function that cannot be called as it must be.

        `read` caches the results of the code's `read_asset`, if there is one.
        """
        try:
            module = code.execute()
        except FAILURES as error:
            raise _not_set_up(error) from error
        weakref.finalize(self, sys.modules.pop, _registered_name(module), None).atexit = False
        reader = _step(module, "read_asset", ("name", "data"))
        try:
            given: dict[str, object] = dict(assets)
            if reader is not None:
                self._assets = {name: read(name, partial(reader, name, data)) for name, data in assets.items()}
                given = {name: asset.value for name, asset in self._assets.items()}
            setup = getattr(module, "setup", None)
            self._state: object = setup(given) if setup is not None else None
        except FAILURES as error:
            raise _not_set_up(error) from error
        self._preprocess = _step(module, "preprocess", ("inputs", "state"))
        self._postprocess = _step(module, "postprocess", ("outputs", "inputs", "state"))

    @property
    def makes_inputs(self) -> bool:
        """Whether its code makes the program's inputs."""
        return self._preprocess is not None

    @property
    def makes_answers(self) -> bool:
        """Whether its code makes the answers."""
        return self._postprocess is not None

    def preprocess(self, inputs: dict[str, Value]) -> dict[str, torch.Tensor]:
        """Return the program's inputs by name. Raises HandlerError if the code fails (with the author's line) or
        does not return tensors by name, and CallerError if the code raises it.
        """
        if self._preprocess is None:
            # Inputs of BYTES are for `postprocess`.
            return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        with _described("preprocess"):
            values = self._call("preprocess", self._preprocess, dict(inputs), self._state)
            return {name: _tensor(name, value) for name, value in values.items()}

    def postprocess(self, outputs: dict[str, torch.Tensor], inputs: dict[str, Value]) -> dict[str, Value]:
        """Return the function's outputs by name. Raises the errors of `preprocess`."""
        if self._postprocess is None:
            return dict(outputs)
        with _described("postprocess"):
            values = self._call("postprocess", self._postprocess, outputs, inputs, self._state)
            return {name: _sendable(name, value) for name, value in values.items()}

    def _call(self, name: str, step: Step, *arguments: object) -> dict[str, object]:
        try:
            given = step(*arguments)
            values = dict(given) if isinstance(given, Mapping) else None
            unnamed = [repr(key) for key in values or () if type(key) is not str]
        except CallerError as error:
            # A handler raises CallerError for an error in the request.
            raise CallerError(_text(_said(error))) from error
        except FAILURES as error:
            raise HandlerError(f"{name} failed: {_error_text(error)}") from error
        if values is None:
            raise HandlerError(f"{name} must return a dict of named values, not {type(given).__name__}")
        if unnamed:
            raise HandlerError(f"{name} must return a dict of named values; {_text(unnamed[0])} is not a string")
        return values


@contextmanager
def _described(step: str) -> Iterator[None]:
    """Raise HandlerError if what the step raised or returned cannot be described, because that, too, runs code of the
    author: such an error must not fail other requests.
    """
    try:
        yield
    except FAILURES as error:
        # The text of any other error may come from code of the author, too.
        if type(error) in (CallerError, HandlerError) and all(type(each) is str for each in error.args):
            raise
        _raise_interrupt(error)
        raise HandlerError(f"{step} failed, or returned no dict of named values, and describing that failed") from error


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise HandlerError(f"preprocess must return a torch.Tensor for each program input; {name!r} is of type {kind}")
    return plain(name, value)


def _step(module: ModuleType, name: str, arguments: tuple[str, ...]) -> Step | None:
    """Return the module's function of that name, if it has one; raise HandlerError if it cannot be called with
    these arguments.
    """
    step = getattr(module, name, None)
    if step is None:
        return None
    called = f"{name}({', '.join(arguments)})"
    if not callable(step):
        raise HandlerError(f"the handler's {name} is of type {type(step).__name__}; it must be a function {called}")
    try:
        inspect.signature(step).bind(*arguments)
    except TypeError as error:
        raise HandlerError(f"the handler's {name} cannot be called as {called}: {error}") from None
    except ValueError:
        # Python does not know the signature of some callables.
        pass
    return cast("Step", step)


def _sendable(name: str, value: object) -> Value:
    if isinstance(value, torch.Tensor):
        return plain(name, value)
    # Accept only plain lists and bytes: an object of a class of the author may give other contents at each access.
    if type(value) is list and all(type(item) is bytes for item in value):
        return list(value)
    if type(value) is list and all(type(row) is list for row in value):
        rows = [list(row) for row in value]
        if len({len(row) for row in rows}) == 1 and all(type(item) is bytes for row in rows for item in row):
            return rows
    raise HandlerError(
        f"postprocess must return a torch.Tensor, a list of bytes or a list of equally long lists of bytes for {name!r}"
    )


def _not_set_up(error: BaseException) -> HandlerError:
    return HandlerError(f"the handler could not be set up: {_error_text(error)}")


def _error_text(error: BaseException) -> str:
    """Format an error with the last line of the author's code in its traceback, in text that can be sent."""
    _raise_interrupt(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILENAME]
    where = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return _text(f"{type(error).__name__}: {_said(error)}{where}")


def _raise_interrupt(error: BaseException) -> None:
    """Raise the error again if it is an interrupt, by which a deployer ends a trial of a handler on its own machine."""
    if isinstance(error, KeyboardInterrupt):
        raise error


def _said(error: BaseException) -> str:
    """Return the text of an error, which code of the author may make."""
    try:
        # Joined, so that it is a plain string: `str` returns an object of the author's own string class unchanged.
        return "".join([str(error)])
    except FAILURES:
        return "(its text could not be made)"


def _text(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()

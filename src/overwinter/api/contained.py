"""Opens and exports a model from a third party in a worker's sandbox, in a process of its own.

The checks in `model/saved.py` and `model/pretrained.py` refuse files with more than data. But PyTorch and
`transformers` resolve, evaluate, import and download so much by names in a file that a check may miss something. What
it misses runs here and can read the model, Python's libraries and a few files of the system, write its result, and
reach no network, no process and no other file. The result is data, and is checked as a node checks an upload.

Run as `python -P -m overwinter.api.contained RESULT WEIGHTS`, which are descriptors; standard input is an `_Order`.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgspec

from overwinter.api.deployer import Sample
from overwinter.core.agreement import Agreement
from overwinter.core.errors import OverwinterError, ProgramError, StoreError, error_named
from overwinter.model.encoding import MAX_PROGRAM_BYTES
from overwinter.model.program import Weight, decode_program, encode_program, validate
from overwinter.store.manifest import SampleTensor
from overwinter.store.packing import aligned

if TYPE_CHECKING:
    from overwinter.model.agreement import Agreed

MODULE = ("-P", "-m", "overwinter.api.contained")
"""`-P`: without it, Python would import modules from the current directory."""
ENDED_BY_SIGNAL = 128
UNLIMITED = 1 << 44
RESULT_BYTES_MAX = MAX_PROGRAM_BYTES + (256 << 20)
"""The most bytes of a program, with the assets and samples of a task."""
MESSAGE_MAX = 4096
INVALID = (msgspec.MsgspecError, ValueError, RuntimeError, MemoryError, StoreError)
"""What an invalid result may raise."""


class DeployableModel(NamedTuple):
    """A program that was compared with its model, and for a task what the function has in addition."""

    agreed: "Agreed"
    handler: str | None = None
    assets: Mapping[str, bytes] = {}
    samples: Sequence[Sample] = ()
    """Requests that the function must be able to answer."""


class _Order(msgspec.Struct):
    """What to open: a `.pt2` file, or a directory of `transformers`. `task` and `options` are for a directory only."""

    path: str
    max_batch: int
    task: str | None
    options: dict[str, Any]


class _Exported(msgspec.Struct, tag=True):
    program: bytes
    agreement: Agreement
    handler: str | None
    assets: dict[str, bytes]
    samples: list[tuple[SampleTensor, ...]]


class _Refused(msgspec.Struct, tag=True):
    error: str
    message: str


def open_contained(
    path: Path, max_batch: int = 1, task: str | None = None, options: Mapping[str, Any] | None = None
) -> DeployableModel:
    """Open a `.pt2` file or a directory of `transformers`, export it, and compare the program with the model.

    Raises ProgramError if the model is refused, or if this system has no sandbox for it; CallerError for an unknown
    task or a wrong option of it.
    """
    if task is not None:
        from overwinter.tasks.directory import check_task

        # Before the process imports `transformers`, which takes seconds.
        check_task(task, options or {})
    order = _Order(str(path.absolute()), max_batch, task, dict(options or {}))
    with TemporaryFile() as result, TemporaryFile() as weights, TemporaryFile() as output:
        fds = (result.fileno(), weights.fileno())
        run = subprocess.run(
            [sys.executable, *MODULE, *map(str, fds)],
            input=msgspec.json.encode(order),
            stdout=subprocess.DEVNULL,
            stderr=output,
            pass_fds=fds,
            # Nothing of the user's environment, which may contain secrets.
            env={"PYTHONPATH": os.pathsep.join(place for place in sys.path if os.path.isabs(place))},
            check=False,
        )
        if run.returncode:
            raise ProgramError(f"{path.name} cannot be opened: {_ending(run.returncode, output)}")
        result.seek(0)
        return _opened(path, task, result.read(RESULT_BYTES_MAX + 1), weights.fileno())


def open_here(
    path: Path, max_batch: int, task: str | None, options: Mapping[str, Any] | None, *, trusted: bool
) -> DeployableModel:
    """Open, export and compare a model in this process. Code in a `trusted` file runs."""
    from overwinter.model.agreement import agree
    from overwinter.model.export import export_saved

    if not path.is_dir():
        return DeployableModel(agree(export_saved(path, trusted=trusted), max_batch))
    from overwinter.tasks.directory import export_directory, open_directory

    directory = open_directory(path, task, options)
    agreed = agree(export_directory(directory), max_batch)
    return DeployableModel(agreed, directory.handler, directory.assets, directory.samples)


def _ending(code: int, output: IO[bytes]) -> str:
    if code > ENDED_BY_SIGNAL:
        return f"the process that opened it was ended by signal {code - ENDED_BY_SIGNAL}"
    output.seek(max(0, os.fstat(output.fileno()).st_size - MESSAGE_MAX))
    lines = output.read().decode(errors="replace").strip().splitlines() or [f"code {code}"]
    return f"the process that opened it failed: {lines[-1]}"


def _opened(path: Path, task: str | None, result: bytes, weights: int) -> DeployableModel:
    """Decode and check what the process wrote, which may be any bytes. Raises ProgramError, or the process's error."""
    from overwinter.model.agreement import Agreed
    from overwinter.worker.weights import MappedBlock

    try:
        if len(result) > RESULT_BYTES_MAX:
            raise ValueError(f"more than {RESULT_BYTES_MAX} bytes")
        answer = msgspec.msgpack.decode(result, type=_Exported | _Refused)
        if isinstance(answer, _Refused):
            raise error_named(answer.error)(answer.message[:MESSAGE_MAX])
        program = decode_program(answer.program)
        validate(program)
        *starts, end = _offsets(program.weights)
        block = MappedBlock(weights, end)
        tensors = [block.tensor(weight, start) for weight, start in zip(program.weights, starts, strict=True)]
    except INVALID as error:
        raise ProgramError(f"{path.name} cannot be opened: its process gave an invalid result: {error}") from None
    agreed = Agreed(program, tensors, answer.agreement)
    return DeployableModel(agreed, _known_handler(path, task, answer.handler), answer.assets, answer.samples)


def _known_handler(path: Path, task: str | None, source: str | None) -> str | None:
    """Return the source of a handler, which must be one of Overwinter's own for the task."""
    from overwinter.tasks.directory import TASKS

    if source is not None and (task is None or source not in TASKS[task].sources()):
        raise ProgramError(f"{path.name} cannot be opened: its process gave another handler than that of the task")
    return source


def _offsets(weights: Sequence[Weight]) -> list[int]:
    """Return where each weight begins in the file of weights, and the size of the file, which is not empty."""
    *starts, end = accumulate((aligned(weight.nbytes) for weight in weights), initial=0)
    return [*starts, max(1, end)]


# In the process


def main() -> None:
    """Open the model in the sandbox, and write the result."""
    from overwinter.worker.sandbox import NO_SEPARATE_USER, Sandbox, WorkerLimits, die_with_parent

    result, weights = map(int, sys.argv[1:])
    die_with_parent(os.getppid())
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    _import_ahead(order)
    # An import may have started threads, which would stay outside the sandbox; a fork does not have them.
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(code if code >= 0 else ENDED_BY_SIGNAL - code)
    model = os.open(order.path, os.O_RDONLY | os.O_NONBLOCK)
    kind = os.fstat(model).st_mode
    # The sandbox permits reading what was opened, even if the name means another file by now.
    readable = [f"/proc/self/fd/{model}"] if stat.S_ISREG(kind) or stat.S_ISDIR(kind) else []
    limits = WorkerLimits(UNLIMITED, UNLIMITED, UNLIMITED)
    lacking = Sandbox(readable=readable).enter(None, limits, [result, weights])
    lacking = [each for each in lacking if each != NO_SEPARATE_USER]
    answer = _uncontained(order.path, lacking) if lacking else _export(order, weights)
    with open(result, "wb") as file:
        file.write(msgspec.msgpack.encode(answer))


def _import_ahead(order: _Order) -> None:
    """Import what opens the model, and find the directory for temporary files, before the sandbox hides other files."""
    import overwinter.model.agreement
    import overwinter.model.export  # noqa: F401

    gettempdir()
    if Path(order.path).is_dir():
        from overwinter.model.pretrained import import_transformers

        import_transformers()


def _uncontained(path: str, lacking: Sequence[str]) -> _Refused:
    return _Refused(
        ProgramError.__name__,
        f"{Path(path).name} cannot be opened safely here ({'; '.join(lacking)}): deploy it from another machine or, if "
        "you trust its author, with --trust",
    )


def _export(order: _Order, weights: int) -> _Exported | _Refused:
    from overwinter.api.deployer import bytes_of, declared_inputs, sample_tensors

    try:
        opened = open_here(Path(order.path), order.max_batch, order.task, order.options, trusted=False)
    except OverwinterError as error:
        return _Refused(type(error).__name__, str(error))
    program, tensors, agreement = opened.agreed
    *starts, end = _offsets(program.weights)
    with open(weights, "wb") as file:
        for start, tensor in zip(starts, tensors, strict=True):
            file.seek(start)
            file.write(bytes_of(tensor))
        file.truncate(end)
    inputs = declared_inputs(opened.handler, program.inputs)
    samples = [sample_tensors(sample, inputs) for sample in opened.samples]
    return _Exported(encode_program(program), agreement, opened.handler, dict(opened.assets), samples)


if __name__ == "__main__":
    main()

"""Exports a `.pt2` file from a third party in a worker's sandbox, in a process of its own.

`model/saved.py` refuses a file that is not only data. But PyTorch resolves, evaluates and generates so much from such a
file that a list may miss something. What it misses runs here: it can read the file and Python's libraries, write its
result, and reach no network, no process and no other file. The result is data, and is checked as a node checks an
upload.

Run as `python -P -m overwinter.cli.contained FILE MAX_BATCH RESULT WEIGHTS`; the last two are descriptors.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING

import msgspec

from overwinter.core.agreement import Agreement
from overwinter.core.errors import OverwinterError, ProgramError, StoreError
from overwinter.model.program import Weight, decode_program, encode_program, validate
from overwinter.store.packing import aligned

if TYPE_CHECKING:
    from overwinter.model.agreement import Agreed

MODULE = ("-P", "-m", "overwinter.cli.contained")
"""`-P`: without it, Python would import modules from the current directory."""
ENDED_BY_SIGNAL = 128
UNLIMITED = 1 << 44


class _Exported(msgspec.Struct, tag=True):
    program: bytes
    agreement: Agreement


class _Refused(msgspec.Struct, tag=True):
    message: str


def agree_contained(path: Path, max_batch: int = 1) -> "Agreed":
    """Export a `.pt2` file, compare its program with its model as `agree` does, and return the result.

    Raises ProgramError if the file is refused, or if this system has no sandbox for it.
    """
    # Variables of the command line, such as a token, are not for the file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OVERWINTER_")}
    with TemporaryFile() as result, TemporaryFile() as weights:
        fds = (result.fileno(), weights.fileno())
        command = [sys.executable, *MODULE, str(path.absolute()), str(max_batch), *map(str, fds)]
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            env=environment,
            check=False,
        )
        if run.returncode:
            raise ProgramError(f"{path.name} cannot be opened: {_end(run.returncode, run.stderr)}")
        result.seek(0)
        return _agreed(path, result.read(), weights.fileno())


def _end(code: int, output: bytes) -> str:
    if code > ENDED_BY_SIGNAL:
        return f"the process that opened it was ended by signal {code - ENDED_BY_SIGNAL}"
    lines = output.decode(errors="replace").strip().splitlines() or [f"code {code}"]
    return f"the process that opened it failed: {lines[-1]}"


def _agreed(path: Path, result: bytes, weights: int) -> "Agreed":
    """Return what the process wrote, which may be any bytes."""
    from overwinter.model.agreement import Agreed
    from overwinter.worker.weights import MappedBlock

    try:
        answer = msgspec.msgpack.decode(result, type=_Exported | _Refused)
        if isinstance(answer, _Refused):
            raise ProgramError(answer.message)
        program = decode_program(answer.program)
        validate(program)
        block = MappedBlock(weights, _offsets(program.weights)[-1])
    except (msgspec.DecodeError, StoreError) as error:
        raise ProgramError(f"{path.name} cannot be opened: its process gave an invalid result: {error}") from None
    places = zip(program.weights, _offsets(program.weights)[:-1], strict=True)
    return Agreed(program, [block.tensor(weight, offset) for weight, offset in places], answer.agreement)


def _offsets(weights: Sequence[Weight]) -> list[int]:
    """Return where each weight begins in the file of weights, and the size of the file, which is not empty."""
    *starts, end = accumulate((aligned(weight.nbytes) for weight in weights), initial=0)
    return [*starts, max(1, end)]


def main() -> None:
    """Export the file in the sandbox, and write the result."""
    from overwinter.worker.sandbox import NO_SEPARATE_USER, Sandbox, WorkerLimits, die_with_parent

    path, max_batch, result, weights = sys.argv[1], *map(int, sys.argv[2:])
    die_with_parent(os.getppid())
    import overwinter.model.agreement
    import overwinter.model.export  # noqa: F401 - imported before the sandbox, and before the fork

    # Libraries ask for it when they are imported, and cannot look for it in the sandbox.
    gettempdir()
    # An import may have started threads, which would stay outside the sandbox; a fork does not have them.
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(code if code >= 0 else ENDED_BY_SIGNAL - code)
    sandbox = Sandbox(readable=[path])
    limits = WorkerLimits(UNLIMITED, UNLIMITED, UNLIMITED)
    missing = [each for each in sandbox.enter(None, limits, [result, weights]) if each != NO_SEPARATE_USER]
    answer = _Refused(_uncontained(path, missing)) if missing else _export(Path(path), max_batch, weights)
    with open(result, "wb") as file:
        file.write(msgspec.msgpack.encode(answer))


def _uncontained(path: str, missing: Sequence[str]) -> str:
    return (
        f"{Path(path).name} cannot be opened safely here ({'; '.join(missing)}): deploy it from another machine or, if "
        "you trust its author, with --trust"
    )


def _export(path: Path, max_batch: int, weights: int) -> _Exported | _Refused:
    from overwinter.api.deployer import bytes_of
    from overwinter.model.agreement import agree
    from overwinter.model.export import export_saved

    try:
        program, tensors, agreement = agree(export_saved(path), max_batch)
    except OverwinterError as error:
        return _Refused(str(error))
    *starts, end = _offsets(program.weights)
    with open(weights, "wb") as file:
        for start, tensor in zip(starts, tensors, strict=True):
            file.seek(start)
            file.write(bytes_of(tensor))
        file.truncate(end)
    return _Exported(encode_program(program), agreement)


if __name__ == "__main__":
    main()

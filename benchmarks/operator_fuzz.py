"""Fuzzes all operators that programs may call, to find out-of-bounds accesses, uninitialised memory and crashes.

Each listed operator is called as in a worker, by a validated and compiled program, on tensors between guard pages, in
forked processes with limits on memory and time. A call runs twice with different bytes in fresh memory: results that
differ reveal uninitialised memory. `fuzz` is the entry point for drivers.
"""

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple

import torch

from benchmarks.guard_pages import GuardedMemory
from benchmarks.operator_calls import OperatorCall, changed, valid_calls
from benchmarks.operator_programs import program_of
from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import ProgramError
from overwinter.model.compile import compile_program
from overwinter.model.operators import TENSOR_OPERATORS
from overwinter.model.program import validate

MEMORY_BYTES = 256 << 20
"""The most memory that a child process may add to what it has at its fork."""
CPU_S = 1.0
"""The most CPU time of a call. A longer one is `slow`: in a worker the request's timeout ends it."""
WALL_S = 60.0
"""The most time of a call, including waiting. A longer one is `hung`."""
CHILD_TRIES = 500
COMPARED_ELEMENTS = 1 << 18
"""Larger results, mostly expanded tensors, are not compared."""

KINDS = ("ok", "refused", "slow", "outside", "crash", "unwritten", "strange", "hung")
"""The possible results of a call.

ok: gave results; refused: raised a Python exception, before or while it ran; slow: see `CPU_S`. The others are
findings. outside: accessed memory beside its tensors; crash: ended its process; unwritten: returned uninitialised
memory; strange: returned something other than a plain tensor within its storage; hung: did not end.
"""

ANSWERED = (ProgramError, RuntimeError, ArithmeticError, IndexError, ValueError, TypeError, MemoryError)
"""What operators, and the checks before them, raise. Anything else is a defect of a check, and counts as a crash."""

_DEATHS = {signal.SIGSEGV: "outside", signal.SIGBUS: "outside", signal.SIGPROF: "slow", signal.SIGALRM: "hung"}
_FRESH_BYTES = (0x5A, 0xA5)
_libc = ctypes.CDLL(None)
_M_PERTURB = -6


class Finding(NamedTuple):
    """A call with a forbidden effect; operator, seed and number repeat it."""

    operator: str
    seed: int
    at: int
    kind: str
    call: str


class Outcome(NamedTuple):
    """The results of many calls."""

    tries: int
    counts: dict[str, int]
    """The number of calls by kind of result."""
    findings: tuple[Finding, ...]


def operators() -> list[str]:
    """Return every operator on tensors that a program may call."""
    return sorted(TENSOR_OPERATORS)


def fuzz(seed: int, tries: int, names: Sequence[str] | None = None) -> Outcome:
    """Call each operator (of `names`, if given) `tries` times.

    The same seed makes the same calls; seed 0 begins with a valid one of each. It forks, so the calling process should
    run no threads. A call takes about a millisecond.
    """
    valid = valid_calls()
    jobs = [(name, at) for at in range(tries) for name in (operators() if names is None else names)]
    counts = dict.fromkeys(KINDS, 0)
    findings: list[Finding] = []
    done = 0
    while done < len(jobs):
        kinds = _in_child(valid, seed, jobs[done : done + CHILD_TRIES])
        for (name, at), kind in zip(jobs[done:], kinds, strict=False):
            counts[kind] += 1
            if KINDS.index(kind) > KINDS.index("slow"):
                findings.append(Finding(name, seed, at, kind, repr(call_of(valid, seed, name, at))))
        done += len(kinds)
    return Outcome(len(jobs), counts, tuple(findings))


def call_of(valid: dict[str, list[OperatorCall]], seed: int, name: str, at: int) -> OperatorCall:
    """Return the call with this number."""
    rng = Random(f"{seed} {name} {at}")
    calls = valid[name]
    times = rng.choice((1, 1, 1, 2, 2, 3)) if seed or at else 0
    return changed(calls[(seed + at) % len(calls)], rng, times)


def attempt(call: OperatorCall, seed: str) -> str:
    """Run the call twice in this process, which it may end; return the result."""
    results = []
    try:
        for byte in _FRESH_BYTES:
            _libc.mallopt(_M_PERTURB, byte)
            results.append(_contents(call, byte, Random(seed)))
    except _EndedError as error:
        return error.kind
    finally:
        _libc.mallopt(_M_PERTURB, 0)
    return "ok" if results[0] == results[1] else "unwritten"


class _EndedError(Exception):
    """A run had no result that could be compared."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _contents(call: OperatorCall, byte: int, rng: Random) -> list[tuple[object, ...]]:
    """Return the results of a run in which uninitialised memory is filled with `byte`."""
    with GuardedMemory(byte, at_end=rng.random() < 0.5) as memory, torch.inference_mode():
        tried = program_of(call, memory, rng)
        results: tuple[object, ...] | None = None
        with suppress(*ANSWERED):
            validate(tried.program)
            results = compile_program(tried.program, tried.start)(tried.weights, tried.given)
        if not memory.is_whole():
            raise _EndedError("outside")
        if results is None:
            raise _EndedError("refused")
        contents = [_content(result) for result in results]
        del results
    return contents


def _content(result: object) -> tuple[object, ...]:
    """Return the part of a result that is compared."""
    if not isinstance(result, torch.Tensor) or result.layout != torch.strided or result.device.type != "cpu":
        raise _EndedError("strange")
    if str(result.dtype).removeprefix("torch.") not in DTYPE_BYTES and result.dtype != torch.complex32:
        raise _EndedError("strange")
    span = 1 + sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True))
    inside = (result.storage_offset() + span) * result.element_size() <= result.untyped_storage().nbytes()
    least = min((*result.shape, *result.stride()), default=0)
    if least < 0 or (result.numel() and not inside):
        raise _EndedError("strange")
    if result.numel() > COMPARED_ELEMENTS:
        return result.dtype, result.shape
    plain = torch.zeros(result.shape, dtype=result.dtype).copy_(result)
    return result.dtype, result.shape, plain.flatten().view(torch.uint8).numpy().tobytes()


def _in_child(valid: dict[str, list[OperatorCall]], seed: int, jobs: Sequence[tuple[str, int]]) -> list[str]:
    """Return the results of the first of these calls, in order: of those that one child process ran, including one that
    ended it.
    """
    with mmap.mmap(-1, len(jobs)) as kinds:
        kinds[:] = bytes([_UNKNOWN]) * len(jobs)
        pid = os.fork()
        if pid == 0:
            try:
                _run_calls(valid, seed, jobs, kinds)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        known = [KINDS[kind] for kind in kinds[:] if kind != _UNKNOWN]
    if os.WIFSIGNALED(status):
        known.append(_DEATHS.get(signal.Signals(os.WTERMSIG(status)), "crash"))
    elif len(known) < len(jobs):
        known.append("crash")
    return known[: len(jobs)]


_UNKNOWN = 255


def _run_calls(
    valid: dict[str, list[OperatorCall]], seed: int, jobs: Sequence[tuple[str, int]], kinds: mmap.mmap
) -> None:
    """Run the calls, record the kind of each result, and end this process."""
    faulthandler.disable()
    warnings.simplefilter("ignore")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    _limit_memory()
    for number, (name, at) in enumerate(jobs):
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        kinds[number] = KINDS.index(attempt(call_of(valid, seed, name, at), f"{seed} {name} {at}"))
    os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/status") as lines:
        [data] = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY_BYTES, data + MEMORY_BYTES))

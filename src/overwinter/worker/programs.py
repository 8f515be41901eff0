"""The programs that a tenant's zygote has compiled and warmed up by one run on zeros.

The zygote never holds a handler: code of authors runs in workers only.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from overwinter.core.errors import OverwinterError
from overwinter.core.ids import Address
from overwinter.worker.channel import close_all
from overwinter.worker.family import Family
from overwinter.worker.heap import release_heap
from overwinter.worker.messages import Prepare
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import OPERATOR_ERRORS
from overwinter.worker.shortage import lacks_memory

_libc = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
WARM_UP_LARGEST_IN_HEAP_BYTES = 128 << 10
"""During a warm-up, larger allocations are outside of the heap."""
LARGEST_IN_HEAP_BYTES = 32 << 20
"""In a worker that is forked after a warm-up, larger allocations are outside of the heap. glibc would raise its
threshold to this value at most.
"""


class Programs(Mapping[Address, Prepared]):
    """The prepared programs, by address."""

    def __init__(self) -> None:
        self._ready: dict[Address, Prepared] = {}

    def __getitem__(self, program: Address) -> Prepared:
        return self._ready[program]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._ready)

    def __len__(self) -> int:
        return len(self._ready)

    def prepare(self, message: Prepare, fds: list[int]) -> None:
        """Compile the program of `message`, and run it once. Failures are logged; workers compile what this did not."""
        try:
            with _tensors_outside_heap():
                self._ready[message.load.program] = self._warmed_up(message, fds)
        except OverwinterError as error:
            _log(f"{message.bind.function} is not prepared: {error}")
        except Exception as error:  # noqa: BLE001 - the boundary to a program: the zygote continues
            _log(f"{message.bind.function} is not prepared: {type(error).__name__}: {error}")
        # Freeze the objects, so that the garbage collectors of forks do not write to shared pages.
        gc.collect()
        gc.freeze()
        release_heap()

    def _warmed_up(self, message: Prepare, fds: list[int]) -> Prepared:
        try:
            family = Family(message.load, fds[:1], self)
        except BaseException:
            close_all(fds[1:])
            raise
        family.take(message.bind, fds[1:])()
        runner = family.runner(message.bind.function)
        assert runner is not None, "it was bound just now"
        try:
            runner.warm_up()
        except OPERATOR_ERRORS as error:
            if lacks_memory(error):
                raise
            # It is compiled, and may run on other values than zeros.
            _log(f"{message.bind.function} is compiled, but fails on zeros: {error}")
        # Computed here, so that workers need not compute it.
        _ = family.prepared.activation_bytes
        return family.prepared

    def forget(self, program: Address) -> None:
        """Drop a program."""
        self._ready.pop(program, None)


@contextmanager
def _tensors_outside_heap() -> Iterator[None]:
    """Allocate large tensors outside the heap.

    In the heap, freed tensors would leave small gaps. A fork that uses them takes a page fault for each small page;
    without gaps it allocates at the end of the heap, where it gets huge pages if the kernel gives them unasked (a
    worker cannot ask for them: seccomp.py).
    """
    _libc.mallopt(_MMAP_THRESHOLD, WARM_UP_LARGEST_IN_HEAP_BYTES)
    try:
        yield
    finally:
        # glibc does not adapt a threshold that was set. Without this value a worker would map each large tensor again.
        _libc.mallopt(_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)
        _libc.mallopt(_TRIM_THRESHOLD, 2 * LARGEST_IN_HEAP_BYTES)


def _log(text: str) -> None:
    sys.stderr.write(f"overwinter zygote: {text}\n")

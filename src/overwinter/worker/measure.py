"""Measurements by a worker of itself: its private memory, and the time of each layer.

The node measures the time of whole runs from outside, on the path that requests take.
"""

import os
import resource
import time
from collections.abc import Iterable

import torch

from overwinter.model.compile import Timed, compile_timed
from overwinter.worker.messages import Measure, Measured
from overwinter.worker.runner import Runner

CHUNK_BYTES = 1 << 16
KIB = 1024


class SelfMeasurement:
    """Measures the worker that creates it. It opens a file, so it is created before the worker enters its sandbox."""

    def __init__(self, cores: int) -> None:
        """Limit this process, and all its later threads, to `cores` of its allowed cores."""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
        self.fd = os.open("/proc/self/smaps", os.O_RDONLY | os.O_CLOEXEC)
        self._timed: Timed | None = None

    def measured(self, runner: Runner, asked: Measure) -> Measured:
        """Return the measurements that `asked` requests."""
        layers = () if asked.batch is None else self.layer_seconds(runner, asked.batch)
        return Measured(self.private_bytes(), layers)

    def layer_seconds(self, runner: Runner, batch: int) -> tuple[float, ...]:
        """Return the seconds of each layer in one run of a batch of zeros, in the program's order."""
        if self._timed is None:
            self._timed = compile_timed(runner.program, time.perf_counter)
        inputs = runner.zeros(batch)
        marks: list[float] = []
        with torch.inference_mode():
            begun = time.perf_counter()
            self._timed(runner.weights, inputs, marks)
        return tuple(after - before for before, after in zip([begun, *marks], marks, strict=False))

    def private_bytes(self) -> int:
        """Return the peak private memory of this process: its current private memory, plus the difference between the
        maximum of its resident memory and the current value.
        """
        private, resident = kibibytes(self._lines())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (private + max(0, peak - resident)) * KIB

    def _lines(self) -> list[str]:
        os.lseek(self.fd, 0, os.SEEK_SET)
        chunks = []
        while chunk := os.read(self.fd, CHUNK_BYTES):
            chunks.append(chunk)
        return b"".join(chunks).decode(errors="replace").splitlines()


def kibibytes(smaps: Iterable[str]) -> tuple[int, int]:
    """Return KiB of private memory and of all resident memory in the lines of /proc/self/smaps.

    Only private writable mappings count as private. The kernel reports a shared page as private while only one process
    maps it, which would include weights, buffers and the code of libraries.
    """
    private = resident = 0
    own = False
    for line in smaps:
        key, *fields = line.split()
        if not key.endswith(":"):
            own = fields[0][1] == "w" and fields[0][3] == "p"
        elif key == "Rss:":
            resident += int(fields[0])
        elif own and key in ("Private_Clean:", "Private_Dirty:"):
            private += int(fields[0])
    return private, resident

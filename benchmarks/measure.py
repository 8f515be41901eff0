"""Measures memory and CPU time of processes, and prints results.

Memory is PSS from /proc/PID/smaps_rollup: a page that n processes share counts 1/n for each, so that a sum over
processes counts it once. Other processes that map the same files (PyTorch's libraries) reduce the files' share. Workers
hide their memory from other users, so reading it needs root.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
BUFFER = "/memfd:overwinter-"


class Memory(NamedTuple):
    """The bytes of PSS by class."""

    anonymous: int
    files: int
    shared: int
    """The bytes of tmpfs files and memory files."""

    @property
    def total(self) -> int:
        """The sum of all classes."""
        return sum(self)


def memory(pids: Iterable[int]) -> Memory:
    """Return the sum over these processes, without those that have ended."""
    sums = [0, 0, 0]
    for pid in pids:
        rows = dict(_rows(f"/proc/{pid}/smaps_rollup"))
        for place, key in enumerate(("Pss_Anon", "Pss_File", "Pss_Shmem")):
            sums[place] += rows.get(key, 0)
    return Memory(*sums)


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the resident memory of the processes, shared or not (RSS)."""
    return sum(dict(_rows(f"/proc/{pid}/smaps_rollup")).get("Rss", 0) for pid in pids)


def private_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the memory that each of these processes shares with no other, without those that have ended."""
    rows = [dict(_rows(f"/proc/{pid}/smaps_rollup")) for pid in pids]
    return sum(each.get("Private_Dirty", 0) + each.get("Private_Clean", 0) for each in rows)


def descriptors(pids: Iterable[int]) -> int:
    """Return the open descriptors of the processes; those that have ended have none."""
    count = 0
    for pid in pids:
        with suppress(FileNotFoundError):
            count += len(os.listdir(f"/proc/{pid}/fd"))
    return count


def buffer_bytes(pids: Iterable[int]) -> int:
    """Return the PSS of the memory files through which the daemon and its workers pass tensors."""
    total = 0
    for pid in pids:
        inside = False
        for line in _lines(f"/proc/{pid}/smaps"):
            if "-" in line.split(" ", 1)[0]:
                inside = BUFFER in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def memory_file_bytes(pid: int) -> int:
    """Return the allocated memory of this process's memory files for tensors; faster than `buffer_bytes`, which reads
    every map.
    """
    total = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        # The descriptor may be closed meanwhile.
        with suppress(FileNotFoundError):
            if os.readlink(entry.path).startswith(BUFFER):
                total += os.stat(entry.path).st_blocks * 512
    return total


def users_of(library: str, besides: Iterable[int]) -> list[int]:
    """Return the other processes that map a file of this name, and so reduce its share in a PSS."""
    known = set(besides)
    users = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        # Processes of other users cannot be read.
        with suppress(PermissionError):
            if pid not in known and any(library in line for line in _lines(f"/proc/{pid}/maps")):
                users.append(pid)
    return users


def cpu_ticks(pid: int, with_ended: bool = False) -> int:
    """Return the processor time of a process, optionally with its ended children, in clock ticks; 0 if it has ended."""
    stop = 15 if with_ended else 13
    lines = list(_lines(f"/proc/{pid}/stat"))
    return sum(int(field) for field in lines[0].rpartition(")")[2].split()[11:stop]) if lines else 0


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of these processes and of their ended children."""
    return sum(cpu_ticks(pid, with_ended=True) for pid in pids) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Return the processor time of the whole machine."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, _lines("/proc/stat")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def file_bytes(directory: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(entry.stat().st_size for entry in directory.rglob("*") if entry.is_file())


def occupied_bytes(directory: Path) -> int:
    """Return the disk space of all files below a directory, in whole pages."""
    return sum(entry.stat().st_blocks * 512 for entry in directory.rglob("*") if entry.is_file())


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread_text(values: Sequence[float]) -> str:
    """Format the median, minimum and maximum for a table."""
    return f"{statistics.median(values):8.1f} ({min(values):.1f}-{max(values):.1f})"


def shares_text(values: Sequence[float]) -> str:
    """Format the mean, minimum and maximum of shares in per cent for a table."""
    return f"{statistics.fmean(values):.1%} [{100 * min(values):.1f}, {100 * max(values):.1f}]"


def rounded(value: Any, digits: int = 4) -> Any:
    """Return the value with all floats in it rounded."""
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    return round(value, digits) if isinstance(value, float) else value


def print_result(values: Mapping[str, Any]) -> None:
    """Print the RESULT line."""
    print("RESULT " + json.dumps(rounded(values)), flush=True)


def settled(probe: Callable[[], int], wait: Callable[[], None], tolerance: float = 0.005, tries: int = 30) -> int:
    """Return the probe's value once two consecutive values agree within the tolerance."""
    before = probe()
    for _ in range(tries):
        wait()
        value = probe()
        if abs(value - before) <= tolerance * max(value, 1):
            return value
        before = value
    raise RuntimeError(f"a measurement did not settle: it is at {before}")


def _rows(path: str) -> Iterable[tuple[str, int]]:
    for line in _lines(path):
        key, _, rest = line.partition(":")
        parts = rest.split()
        if len(parts) == 2 and parts[1] == "kB":
            yield key, int(parts[0]) * 1024


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []

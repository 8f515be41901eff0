"""How much memory do these processes hold, how long did it take, and how is it told?

Memory is PSS out of /proc/PID/smaps_rollup: a page that n processes share counts 1/n for each, so that a sum over
processes counts it once. Other processes that map the same files (PyTorch's libraries) make the files' share smaller.
Workers do not let others look into them, so reading their memory needs root.
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
    """Bytes of PSS by class."""

    anonymous: int
    files: int
    shared: int
    """Of tmpfs files and memory files."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def memory(pids: Iterable[int]) -> Memory:
    """The sum over these processes; a process that has ended meanwhile counts nothing."""
    sums = [0, 0, 0]
    for pid in pids:
        rows = dict(_rows(f"/proc/{pid}/smaps_rollup"))
        for place, key in enumerate(("Pss_Anon", "Pss_File", "Pss_Shmem")):
            sums[place] += rows.get(key, 0)
    return Memory(*sums)


def resident_bytes(pids: Iterable[int]) -> int:
    """The sum of what each process has in memory, shared or not (RSS)."""
    return sum(dict(_rows(f"/proc/{pid}/smaps_rollup")).get("Rss", 0) for pid in pids)


def descriptors(pids: Iterable[int]) -> int:
    """Open descriptors of these processes; one that has ended has none."""
    count = 0
    for pid in pids:
        with suppress(FileNotFoundError):
            count += len(os.listdir(f"/proc/{pid}/fd"))
    return count


def buffer_bytes(pids: Iterable[int]) -> int:
    """PSS of the memory files through which the daemon and its workers pass tensors."""
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
    """What the memory files take that this process holds for tensors: quick, where `buffer_bytes` reads every map."""
    total = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        # It may be closed meanwhile.
        with suppress(FileNotFoundError):
            if os.readlink(entry.path).startswith(BUFFER):
                total += os.stat(entry.path).st_blocks * 512
    return total


def users_of(library: str, besides: Iterable[int]) -> list[int]:
    """Processes other than these that map a file of this name, and so make its share in a PSS smaller."""
    known = set(besides)
    users = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        # What belongs to another user may not be looked at.
        with suppress(PermissionError):
            if pid not in known and any(library in line for line in _lines(f"/proc/{pid}/maps")):
                users.append(pid)
    return users


def cpu_ticks(pid: int, with_ended: bool = False) -> int:
    """Processor time of a process, and if asked of its children that have ended, in clock ticks; 0 when it is gone."""
    stop = 15 if with_ended else 13
    lines = list(_lines(f"/proc/{pid}/stat"))
    return sum(int(field) for field in lines[0].rpartition(")")[2].split()[11:stop]) if lines else 0


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes have used, and those that they have outlived."""
    return sum(cpu_ticks(pid, with_ended=True) for pid in pids) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Processor time that the whole machine has used, on all its cores."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, _lines("/proc/stat")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def file_bytes(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(entry.stat().st_size for entry in directory.rglob("*") if entry.is_file())


def occupied_bytes(directory: Path) -> int:
    """What all files below a directory take where they lie, in whole pages."""
    return sum(entry.stat().st_blocks * 512 for entry in directory.rglob("*") if entry.is_file())


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that is not below `share` of them."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def told_spread(values: Sequence[float]) -> str:
    """Median, least and largest, for a table."""
    return f"{statistics.median(values):8.1f} ({min(values):.1f}-{max(values):.1f})"


def told_shares(values: Sequence[float]) -> str:
    """Mean, least and largest of some shares in per cent, for a table."""
    return f"{statistics.fmean(values):.1%} [{100 * min(values):.1f}, {100 * max(values):.1f}]"


def rounded(value: Any, digits: int = 4) -> Any:
    """The value with all floats in it rounded."""
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    return round(value, digits) if isinstance(value, float) else value


def print_result(values: Mapping[str, Any]) -> None:
    """The line that programs read."""
    print("RESULT " + json.dumps(rounded(values)), flush=True)


def settled(probe: Callable[[], int], wait: Callable[[], None], tolerance: float = 0.005, tries: int = 30) -> int:
    """The probe's value once two in a row agree within the tolerance."""
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

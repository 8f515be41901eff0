"""Reads the kernel's counts of a process from /proc/PID/stat, which any process may read."""

STAT_BYTES = 4096
PARENT, PAGE_FAULTS, THREADS = 1, 7, 17
"""The fields behind the name of the process: the parent, pages added or copied without reading a disk, threads."""


def count_of(pid: int, field: int) -> int:
    """Return a count of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # The name, in brackets, may contain anything.
            return int(file.read(STAT_BYTES).rpartition(b")")[2].split()[field])
    except (OSError, ValueError, IndexError):
        return 0

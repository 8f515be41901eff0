"""Reads the kernel's figures of a process from /proc/PID/stat, which any process may read."""

STAT_BYTES = 4096
STATE, PARENT, MINOR_FAULTS, THREADS = 0, 1, 7, 17
"""The positions of fields among those after the name of the process: its state, parent, minor page faults, and number
of threads.
"""


def stat_field(pid: int, field: int) -> int:
    """Return a numeric field of a process; 0 if it cannot be read, such as that of a process that is gone."""
    try:
        return int(_fields(pid)[field])
    except (OSError, ValueError, IndexError):
        return 0


def lacks_first_thread(pid: int) -> bool:
    """Whether the first thread of a process has ended; the kernel then shows no memory and no files of the process,
    although others of its threads may run.
    """
    try:
        return _fields(pid)[STATE] == b"Z"
    except (OSError, IndexError):
        return False


def _fields(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        # The name, in brackets, may contain anything.
        return file.read(STAT_BYTES).rpartition(b")")[2].split()

"""Reads the kernel's tables of mounted filesystems."""

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
ESCAPED = re.compile(r"\\([0-7]{3})")
"""How the kernel writes spaces, tabs, line breaks and backslashes in a path."""


def mount_lines(table: Path) -> list[list[str]]:
    """Return the fields of each line of a table; nothing if it cannot be read."""
    try:
        # A path may have any bytes.
        text = table.read_text(errors="surrogateescape")
    except OSError:
        return []
    return [[_unescaped(field) for field in line.split(" ")] for line in text.split("\n")]


def filesystem_of(directory: Path, table: Path = MOUNTS) -> str:
    """Return the type of a directory's filesystem, or "filesystem" if the system does not report it."""
    kinds = {fields[1]: fields[2] for fields in mount_lines(table) if len(fields) > 2}
    real = directory.resolve()
    return next((kinds[str(path)] for path in (real, *real.parents) if str(path) in kinds), "filesystem")


def _unescaped(field: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)

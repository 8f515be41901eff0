"""Reads the memory of a process, and of a host store, as the kernel counts it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from overwinter.core.ids import Address
from overwinter.telemetry.accounts import FileMemory, ProcessMemory

SECTOR_BYTES = 512
"""The unit of st_blocks."""
KIB = 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATM_BYTES = 256
STATUS_BYTES = 4096
TABLES_USUAL_BYTES = 8 << 20
"""The page tables that a process has at most for its libraries, blocks and usual memory."""

PIECE_BYTES = 64 << 10
"""How much text is searched at a time, because other threads wait meanwhile."""

_MAPPINGS = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ (....) .*\n(?:[A-OQ-Z].*\n)*Pss: +(\d+) (?:.*\n)*?"
    rb"Private_Clean: +(\d+) .*\nPrivate_Dirty: +(\d+) .*\n(?:.*\n)*?Anonymous: +(\d+) ",
    re.MULTILINE,
)
NO_MEMORY = ProcessMemory(0, 0, 0, 0, 0, 0)
_LAST_LINE = b"\nVmFlags:"
"""The beginning of the last line about a mapping."""
_TABLES = re.compile(rb"^VmPTE:\s+(\d+) kB", re.MULTILINE)


def process_memory(smaps: BinaryIO, mappings_max: int | None = None) -> ProcessMemory | None:
    """Return the memory of a process from its `smaps`, which it opened itself; None if it has ended. Reading ends after
    more than `mappings_max` mappings. It takes milliseconds: call it in a thread.
    """
    total = NO_MEMORY
    try:
        for text in _pieces(smaps.fileno()):
            every = [total, *(_memory_of(*mapping) for mapping in _MAPPINGS.findall(text))]
            total = ProcessMemory(*map(sum, zip(*every, strict=True)))
            if mappings_max is not None and total.mappings > mappings_max:
                break
    except OSError:
        return None
    return total if total.mappings else None


def _memory_of(permissions: bytes, pss: bytes, clean: bytes, dirty: bytes, anonymous: bytes) -> ProcessMemory:
    """Return the memory of one mapping from its fields in KiB."""
    all_pss = int(pss) * KIB
    if permissions[3:] == b"s":
        return ProcessMemory(0, all_pss, all_pss, 0, 0, 1)
    # A process may protect pages from being read or written after it has written to them.
    private = (int(dirty) + (int(clean) if permissions[1:2] == b"w" else 0)) * KIB
    of_no_file = int(anonymous) * KIB
    return ProcessMemory(private, all_pss, 0, max(0, of_no_file - private), max(0, of_no_file - all_pss), 1)


def _pieces(smaps: int) -> Iterator[bytes]:
    """Yield the text in pieces that end with the last line of a mapping."""
    at, rest = 0, b""
    # Other threads read from the same descriptor, and `pread` does not move its file offset.
    while data := os.pread(smaps, PIECE_BYTES, at):
        at, rest = at + len(data), rest + data
        if len(rest) >= PIECE_BYTES:
            end = rest.find(b"\n", rest.rfind(_LAST_LINE) + 1) + 1
            yield rest[:end]
            rest = rest[end:]
    yield rest


def anonymous_bytes(pid: int) -> int | None:
    """Return the bytes of the process that belong to no file, including those that it shares with the process that
    forked it; None if it has ended or is ending, or its first thread has ended. Needs no privileges, and takes a few
    microseconds.
    """
    try:
        fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _, resident, shared, _ = os.read(fd, STATM_BYTES).split(b" ", 3)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return (int(resident) - int(shared)) * PAGE_BYTES if int(resident) else None


def excess_table_bytes(pid: int) -> int:
    """Return the bytes of the process's page tables beyond the usual ones. A page far from all others needs a table of
    its own, as large as the page, also if it is only read and counts nowhere else. Needs no privileges.
    """
    try:
        fd = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        found = _TABLES.search(os.read(fd, STATUS_BYTES))
    except OSError:
        return 0
    finally:
        os.close(fd)
    return 0 if found is None else max(0, int(found[1]) * KIB - TABLES_USUAL_BYTES)


def directory_memory(root: Path) -> dict[Address, FileMemory]:
    """Return the files of a host store's directory by name, without drafts (names with a dot) and directories; none if
    somebody has removed the directory.
    """
    found: dict[Address, FileMemory] = {}
    try:
        entries = list(os.scandir(root))
    except FileNotFoundError:
        return found
    for entry in entries:
        if "." in entry.name or not entry.is_file(follow_symlinks=False):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            # The file was dropped meanwhile.
            continue
        found[Address(entry.name)] = FileMemory(status.st_size, status.st_blocks * SECTOR_BYTES)
    return found

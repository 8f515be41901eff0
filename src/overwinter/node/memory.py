"""Reads the memory of a process, and of a host store, as the kernel counts it."""

import os
import re
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

_MAPPINGS = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ (....) \S+ \S+ (\d+).*\n(?:[A-OQ-Z].*\n)*Pss: +(\d+) (?:.*\n)*?"
    rb"Private_Clean: +(\d+) .*\nPrivate_Dirty: +(\d+) ",
    re.MULTILINE,
)


_TABLES = re.compile(rb"^VmPTE:\s+(\d+) kB", re.MULTILINE)


def process_memory(smaps: BinaryIO) -> ProcessMemory | None:
    """Return the memory of a process from its `smaps`, which it opened itself; None if it has ended. It takes
    milliseconds: call it in a thread.
    """
    try:
        smaps.seek(0)
        text = smaps.read()
    except OSError:
        return None
    if not text:
        return None
    private = pss = shared = anonymous = 0
    for permissions, inode, own_pss, clean, dirty in _MAPPINGS.findall(text):
        is_writable = permissions[1:2] == b"w"
        pss += int(own_pss)
        if permissions[3:] == b"s":
            shared += int(own_pss)
        else:
            # A process may protect pages from being read or written after it has written to them.
            private += int(dirty) + (int(clean) if is_writable else 0)
            anonymous += int(own_pss) if is_writable or inode == b"0" else 0
    return ProcessMemory(private * KIB, pss * KIB, shared * KIB, anonymous * KIB)


def anonymous_bytes(pid: int) -> int | None:
    """Return the bytes of the process that belong to no file, including those that it shares with the process that
    forked it; None if it has ended or is ending. Needs no privileges, and takes a few microseconds.
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
    """Return the bytes of the process's page tables beyond the usual ones: a few pages far from each other take a
    thousand times their size. Needs no privileges.
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
    """Return the files of a host store's directory by name, without drafts (names with a dot) and directories."""
    found = {}
    for entry in os.scandir(root):
        if "." in entry.name or not entry.is_file(follow_symlinks=False):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            # The file was dropped meanwhile.
            continue
        found[Address(entry.name)] = FileMemory(status.st_size, status.st_blocks * SECTOR_BYTES)
    return found

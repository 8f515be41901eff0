"""The seccomp filter, which the kernel applies to each system call, generated from the list of allowed calls.

All other calls are refused, so that calls of later kernels are refused too. Old calls return EPERM, a clear error;
those since Linux 5.1 return ENOSYS, after which libraries try older ones.
"""

import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Mapping
from typing import Literal

from overwinter.worker.system_calls import ALLOWED, FORKING, GPU, Numbers

SandboxKind = Literal["zygote", "worker", "gpu"]
"""A tenant's zygote may fork and contain its children; a worker may create threads, not processes. The executor of a
GPU may also control the GPU's driver.
"""

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_NEW = 424
"""From this number on, calls have the same number on every architecture, and all are newer than Linux 5.0."""

_THREAD, _FILES = 0x10000, 0x400
_THREAD_FLAGS = 0x7D0F00
"""The flags with which the C library creates a thread. None of them creates a namespace."""
_CHILD_FLAGS = _THREAD_FLAGS | 0x1000000 | 0x4000 | 0xFF
"""Also the flags with which the C library forks: they store the child's id, let the parent wait until the child
executes a program or ends (vfork), and name the signal at the child's end.
"""
_ANONYMOUS, _SHARED, _GROWS_DOWN, _HUGE = 0x20, 0x01, 0x100, 0x40000
_PRCTL = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA."""
_FURTHER: Mapping[SandboxKind, Mapping[str, Numbers]] = {"zygote": FORKING, "worker": {}, "gpu": GPU}
_PRCTL_OF_ZYGOTES = (1, 4, 22, 38, 47)
"""PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT."""
_FCNTL = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC."""
_F_SETFL = 4
_AF_UNIX, _STREAM, _SEQPACKET = 1, 1, 5
_SOCKET_FLAGS = 0o2004000
"""SOCK_CLOEXEC, SOCK_NONBLOCK."""
_CLOSE_RANGE = (0, 4)
"""No flag, CLOSE_RANGE_CLOEXEC. CLOSE_RANGE_UNSHARE gives a thread descriptors of its own."""
_IOCTL = (0x5401, 0x5450, 0x5451)
"""TCGETS, FIONCLEX, FIOCLEX."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _REFUSE = (_RETURN, 0, 0, 0x7FFF0000), (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_IGNORE = (_RETURN, 0, 0, 0x00050000)
_EXISTS = (_RETURN, 0, 0, 0x00050000 | errno.EEXIST)
_MISSING = (_RETURN, 0, 0, 0x00050000 | errno.ENOENT)
_UNKNOWN = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)
_OWN = 0xFFFFFFFE
"""A placeholder for the process id, which is unknown when the filter is built."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_libc = ctypes.CDLL(None, use_errno=True)

_Instruction = tuple[int, int, int, int]
"""An operation, the instructions to skip if true and if false, and an operand."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class Filter:
    """A filter that is built once for any number of processes."""

    def __init__(self, kind: SandboxKind) -> None:
        self._code = bytearray()
        self._own_at: list[int] = []
        if platform.machine() in _MACHINES:
            code = _filter(platform.machine(), kind)
            self._code += b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
            self._own_at = [8 * at + 4 for at, instruction in enumerate(code) if instruction[3] == _OWN]

    def install(self) -> list[str]:
        """Install the filter permanently in the calling process, which must have set PR_SET_NO_NEW_PRIVS; return what
        could not be applied.
        """
        if not self._code:
            return [f"system calls are not filtered on {platform.machine()}"]
        for at in self._own_at:
            struct.pack_into("=I", self._code, at, os.getpid())
        code = (ctypes.c_char * len(self._code)).from_buffer(self._code)
        program = _Program(len(self._code) // 8, ctypes.addressof(code))
        # SECCOMP_FILTER_FLAG_SPEC_ALLOW is not set: the system decides whether filtered processes mitigate speculation
        # attacks. Since Linux 5.16 they do not.
        if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
            return [f"system calls are not filtered: {os.strerror(ctypes.get_errno())}"]
        return []


def _filter(machine: str, kind: SandboxKind) -> list[_Instruction]:
    column = _MACHINES.index(machine)
    names = {**ALLOWED, **_FURTHER[kind]}
    checks = _checks(kind)
    calls = {numbers[column]: checks.get(name, [_ALLOW]) for name, numbers in names.items()}
    rules = {number: rule for number, rule in calls.items() if number is not None}
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        _REFUSE,
        (_LOAD, 0, 0, _NUMBER_AT),
        *_tree(_segments(rules)),
    ]


def _segments(rules: Mapping[int, list[_Instruction]]) -> list[tuple[int, list[_Instruction]]]:
    """Return the first number and the rule of each segment, ascending: consecutive numbers with the same rule
    form one.
    """
    segments: list[tuple[int, list[_Instruction]]] = []
    starts = sorted({0, _FIRST_NEW, *rules, *(number + 1 for number in rules)})
    for number in starts:
        rule = rules.get(number, [_REFUSE if number < _FIRST_NEW else _UNKNOWN])
        if not segments or segments[-1][1] != rule:
            segments.append((number, rule))
    return segments


def _tree(segments: list[tuple[int, list[_Instruction]]]) -> list[_Instruction]:
    """Return a binary search for the segment of the loaded number.

    The kernel runs it once for each number when it is installed, and caches the numbers that are allowed with any
    arguments.
    """
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    low, high = _tree(segments[:middle]), _tree(segments[middle:])
    return [(_AT_LEAST, 0, 1, segments[middle][0]), (_JUMP, 0, 0, len(low)), *low, *high]


def _checks(kind: SandboxKind) -> dict[str, list[_Instruction]]:
    """Return the rules of calls that are allowed with some arguments only, or answered without being made."""
    checks = {
        "mmap": _MMAP,
        "open": _opening(1),
        "openat": _opening(2),
        # Only to the peer of the connected channel.
        "sendto": [_low(4), (_EQUAL, 0, 2, 0), _high(4), (_EQUAL, 1, 0, 0), _REFUSE, _ALLOW],
        "prlimit64": _one_of(0, 0),
        "ioctl": _one_of(1, *_IOCTL),
        "fcntl": _one_of(1, *_FCNTL),
        "close_range": _one_of(2, *_CLOSE_RANGE),
        # MADV_COLLAPSE copies pages that a process shares with its zygote. It causes no page faults, by which the node
        # notices copies.
        "madvise": [_low(2), (_EQUAL, 0, 1, _MADV_COLLAPSE), _REFUSE, _ALLOW],
    }
    # A filter cannot read the flags of clone3, which are in memory. So clone3 is not allowed, and the C library falls
    # back to clone.
    if kind == "zygote":
        return {
            **checks,
            "prctl": _one_of(0, *_PRCTL, *_PRCTL_OF_ZYGOTES),
            "clone": [_low(0), (_ANY_BIT, 0, 1, ~_CHILD_FLAGS & 0xFFFFFFFF), _REFUSE, _ALLOW],
        }
    gpu: dict[str, list[_Instruction]] = {}
    if kind == "gpu":
        # The driver's requests differ between versions; Landlock decides for which files they are allowed. The driver
        # shares memory without a file with its threads.
        gpu = {"ioctl": [_ALLOW], "mmap": _ANY_SHARING, "fcntl": _one_of(1, *_FCNTL, _F_SETFL)}
        # It creates its directory in /dev unless that exists, removes files and links before it makes them, and looks
        # for a server with which processes share a GPU. It uses no GPU if these calls fail with EPERM; these
        # answers let it go on.
        gpu |= {"mkdir": [_EXISTS], "mkdirat": [_EXISTS], "socket": _SOCKET}
        gpu |= {call: [_MISSING] for call in ("connect", "unlink", "unlinkat", "symlink", "symlinkat")}
    return {
        **checks,
        **gpu,
        # A heap that grows fast in huge pages can stop a whole virtual machine for a tenth of a second: while the
        # kernel clears such a page, the host has to provide its memory. The C library asks for huge pages, and the
        # filter reports success without a call. A worker that removed memory from a buffer would keep the node waiting.
        "madvise": [
            _low(2),
            *((_EQUAL, 0, 1, _MADV_HUGEPAGE), _IGNORE),
            *((_EQUAL, 0, 1, mmap.MADV_REMOVE), _REFUSE),
            *((_EQUAL, 0, 1, _MADV_COLLAPSE), _REFUSE),
            _ALLOW,
        ],
        "prctl": _one_of(0, *_PRCTL),
        # Threads share their descriptors: otherwise each could have as many as the limit allows.
        "clone": [
            _low(0),
            (_ANY_BIT, 2, 0, ~_THREAD_FLAGS & 0xFFFFFFFF),
            (_ANY_BIT, 0, 1, _THREAD),
            (_ANY_BIT, 1, 0, _FILES),
            _REFUSE,
            _ALLOW,
        ],
        "kill": _one_of(0, _OWN),
        "tgkill": _one_of(0, _OWN),
    }


def _one_of(argument: int, *values: int) -> list[_Instruction]:
    """Return the condition that a 32-bit argument has one of these values."""
    tests = [(_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    return [_low(argument), *tests, _REFUSE, _ALLOW]


def _opening(argument: int) -> list[_Instruction]:
    """Refuse flags for which Landlock checks no right: access mode 3, which neither reads nor writes, and (in older
    kernels) O_TRUNC in a file that is opened for reading.
    """
    tests = [(_EQUAL, 3, 0, 3), (_EQUAL, 2, 0, 3 | os.O_TRUNC), (_EQUAL, 1, 0, os.O_TRUNC)]
    return [_low(argument), (_AND, 0, 0, 3 | os.O_TRUNC), *tests, _ALLOW, _REFUSE]


def _low(argument: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)


def _high(argument: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4)


_SOCKET = [
    _low(0),
    (_EQUAL, 0, 4, _AF_UNIX),
    _low(1),
    (_AND, 0, 0, ~_SOCKET_FLAGS & 0xFFFFFFFF),
    # Those that must be connected before they send: a datagram would reach any socket whose name is known.
    (_EQUAL, 2, 0, _STREAM),
    (_EQUAL, 1, 0, _SEQPACKET),
    _REFUSE,
    _ALLOW,
]
_ANY_SHARING = [_low(3), (_ANY_BIT, 0, 1, _GROWS_DOWN | _HUGE), _REFUSE, _ALLOW]
_MMAP = [
    _low(3),
    # The limit of private memory (RLIMIT_DATA) does not count a mapping that grows down, or shared memory without a
    # file. The kernel does not count reserved huge pages as memory of a process.
    (_ANY_BIT, 2, 0, _GROWS_DOWN | _HUGE),
    (_ANY_BIT, 0, 2, _ANONYMOUS),
    (_ANY_BIT, 0, 1, _SHARED),
    _REFUSE,
    _ALLOW,
]

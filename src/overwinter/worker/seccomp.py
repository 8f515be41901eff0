"""Which system calls a body may not make: those that would leave something behind, or reach around its limits.

It starts no process and becomes no other program, so that nothing of it outlives it; it makes no memory file, which no
limit would count; it traces nobody. Threads it may start.
"""

import ctypes
import errno
import os
import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {
    # fork, vfork, execve, ptrace, setsid, memfd_create, execveat, memfd_secret
    "x86_64": (57, 58, 59, 101, 112, 319, 322, 447),
    # execve, ptrace, setsid, memfd_create, execveat, memfd_secret
    "aarch64": (221, 117, 157, 279, 281, 447),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_X32_CALLS = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_calls() -> list[str]:
    """Refuse them to the calling process for good, which must have given up new privileges; what cannot be applied."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return [f"system calls are not filtered on {machine}"]
    code = _filter(machine)
    program = _Program(len(code) // 8, code)
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        return [f"system calls are not filtered: {os.strerror(ctypes.get_errno())}"]
    return []


def _filter(machine: str) -> bytes:
    """The filter's instructions: each is an operation, how many to skip if true, if false, and an operand."""
    no, unknown = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    rules = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, no)]
    rules += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _X32_CALLS), (_RETURN, 0, 0, no)]
    for number in _DENIED[machine]:
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, no)]
    # Its flags lie in memory, out of a filter's sight; the C library falls back to clone.
    rules += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, unknown)]
    rules += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    rules += [(_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, no), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)

"""Types of identifiers, so that they cannot be confused."""

from functools import lru_cache
from typing import NewType

NAME_MAX = 128
# A `$` instead of \Z would accept a trailing newline.
NAME_PATTERN = rf"\A[a-z0-9][a-z0-9._-]{{0,{NAME_MAX - 1}}}\Z"
"""The names of functions, pipelines, stages and tenants."""

Seconds = NewType("Seconds", float)
Address = NewType("Address", str)
"""The BLAKE3 hash of a block's content and layout: 64 hexadecimal digits."""
FunctionName = NewType("FunctionName", str)
FunctionId = NewType("FunctionId", str)
"""One version of a function: `name@version`."""
FamilyId = NewType("FamilyId", str)
"""Functions that may share workers. A function that shares with none has its own id as its family."""
TenantId = NewType("TenantId", str)
StoreName = NewType("StoreName", str)
"""A host store: empty for the shared one, otherwise the tenant that owns the store."""
SHARED = StoreName("")
"""The host store of all functions without a dedicated one."""
DeviceId = NewType("DeviceId", str)
"""One device of a node's pool, such as `virtual:0`."""
RequestId = NewType("RequestId", int)
WorkerId = NewType("WorkerId", int)
RunId = NewType("RunId", int)
OperationId = NewType("OperationId", int)
"""Identifies one load or one bind; never reused within its kind."""


@lru_cache(maxsize=1 << 15)
def function_id(name: FunctionName, version: int) -> FunctionId:
    """The id of one version of a function. Remembered, because every request asks for it."""
    return FunctionId(f"{name}@{version}")


PROGRAM = ":program"
"""Ends the name of a program that runs on the pool for a function whose handler runs in workers. To the scheduler it is
another function; nobody can deploy or call a function of such a name.
"""


def program_name(name: FunctionName) -> FunctionName:
    """The name of the program of a function with a handler."""
    return FunctionName(f"{name}{PROGRAM}")


def is_program(name: FunctionName | FunctionId | FamilyId) -> bool:
    """Whether this is the name of such a program, or the id of a version of it."""
    return PROGRAM in name


def whole_name(name: FunctionName) -> FunctionName:
    """The name of the function that a program belongs to; the name itself if it is that of a function."""
    return FunctionName(name.removesuffix(PROGRAM))


def program_id(id_: FunctionId) -> FunctionId:
    """The id of the program of a version of a function."""
    name, version = split_id(id_)
    return function_id(program_name(name), version)


def whole_id(id_: FunctionId) -> FunctionId:
    """The id of the version that a program belongs to; the id itself if it is that of a function."""
    return FunctionId(whole_names(id_))


def whole_names(text: str) -> str:
    """A text with the ids of functions in place of those of their programs."""
    return text.replace(f"{PROGRAM}@", "@")


def split_id(id_: FunctionId) -> tuple[FunctionName, int]:
    """The name and the version in an id."""
    name, _, version = id_.rpartition("@")
    return FunctionName(name), int(version)

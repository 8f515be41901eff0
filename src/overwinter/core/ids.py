"""Types of identifiers, so that they cannot be confused."""

import re
from functools import lru_cache
from typing import NewType

NAME_MAX = 128
# A `$` instead of \Z would accept a trailing newline.
NAME_PATTERN = rf"\A[a-z0-9][a-z0-9._-]{{0,{NAME_MAX - 1}}}\Z"
"""The names of functions, pipelines, stages and tenants."""
NAME_RULE = "lower-case letters, digits, dots, dashes and underscores, a letter or digit first"
"""NAME_PATTERN in words."""

Seconds = NewType("Seconds", float)
Address = NewType("Address", str)
"""The BLAKE3 hash of a blob: 64 hexadecimal digits."""
FunctionName = NewType("FunctionName", str)
FunctionId = NewType("FunctionId", str)
"""One version of a function: `name@version`."""
FamilyId = NewType("FamilyId", str)
"""Functions that may share workers. A function that shares with none has an empty family in its FunctionSpec, and its
own id as its family in the scheduler.
"""
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
"""Identifies one load, one bind, or one preparation on a device; never reused within its kind."""


@lru_cache(maxsize=1 << 15)
def function_id(name: FunctionName, version: int) -> FunctionId:
    """The id of one version of a function. Cached, because every request needs it."""
    return FunctionId(f"{name}@{version}")


PART_SEPARATOR = ":"
"""Separates the name of a function from that of a part of it, which the scheduler treats as a function of its own: the
program that runs on the pool for a function in workers (with a handler, or with `device = "any"`); or a slice of a
program, except the first slice. Nobody can deploy or call a function of such a name.
"""
_PARTS = re.compile(rf"{PART_SEPARATOR}(program|\d+)@")


def program_name(name: FunctionName) -> FunctionName:
    """The name of the program that runs on the pool for a function in workers."""
    return FunctionName(f"{name}{PART_SEPARATOR}program")


def slice_name(name: FunctionName, number: int) -> FunctionName:
    """The name of a later slice of a function's program; the first slice has the name of the function or program."""
    return FunctionName(f"{whole_name(name)}{PART_SEPARATOR}{number}")


def slice_number(id_: FunctionId) -> int | None:
    """The number of a later slice in its id; None: it is no later slice."""
    _, _, part = split_id(id_)[0].partition(PART_SEPARATOR)
    return int(part) if part.isdecimal() else None


def is_part(name: FunctionName | FunctionId | FamilyId) -> bool:
    """Whether this is the name of a part of a function, or the id of a part of a version."""
    return PART_SEPARATOR in name


def whole_name(name: FunctionName) -> FunctionName:
    """The name of the function that a part belongs to; the name itself if it is that of a function."""
    return FunctionName(name.partition(PART_SEPARATOR)[0])


def program_id(id_: FunctionId) -> FunctionId:
    """The id of the program that runs on the pool for a version of a function in workers."""
    name, version = split_id(id_)
    return function_id(program_name(name), version)


def whole_id(id_: FunctionId) -> FunctionId:
    """The id of the version that a part belongs to; the id itself if it is that of a function."""
    return FunctionId(whole_names(id_))


def described(id_: FunctionId) -> str:
    """A function or a part in words for users: the id of the function, with the number of a later slice."""
    number, whole = slice_number(id_), whole_id(id_)
    return whole if number is None else f"slice {number} of {whole}"


def whole_names(text: str, of: FunctionId | None = None) -> str:
    """A text with the ids of functions in place of those of their parts. `of`: replace only the ids of this function's
    parts, because the text may come from the function's own code.
    """
    if of is None:
        return _PARTS.sub("@", text)
    name = whole_name(split_id(of)[0])
    return re.sub(rf"\b{re.escape(name)}{PART_SEPARATOR}(program|\d+)@", f"{name}@", text)


def split_id(id_: FunctionId) -> tuple[FunctionName, int]:
    """The name and the version in an id."""
    name, _, version = id_.rpartition("@")
    return FunctionName(name), int(version)

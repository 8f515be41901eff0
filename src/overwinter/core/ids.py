"""Types of identifiers, so that they cannot be confused."""

from typing import NewType

NAME_MAX = 128
# \A and \Z: a `$` would let a trailing newline through.
NAME_PATTERN = rf"\A[a-z0-9][a-z0-9._-]{{0,{NAME_MAX - 1}}}\Z"
"""What a function, a pipeline, a stage of one or a tenant may be called."""

Seconds = NewType("Seconds", float)
Address = NewType("Address", str)
"""BLAKE3 of a block's content and layout: 64 hexadecimal digits."""
FunctionName = NewType("FunctionName", str)
FunctionId = NewType("FunctionId", str)
"""One version of a function: `name@version`."""
FamilyId = NewType("FamilyId", str)
"""Functions that may share workers; a function that shares with nobody has its own id for one."""
TenantId = NewType("TenantId", str)
StoreName = NewType("StoreName", str)
"""A host store of one trust domain: the shared one, or a tenant's own."""
SHARED = StoreName("")
"""The host store of all functions that did not ask for one of their own."""
RequestId = NewType("RequestId", int)
WorkerId = NewType("WorkerId", int)
RunId = NewType("RunId", int)
OperationId = NewType("OperationId", int)
"""One loading, or one bind; never used again among its kind."""


def function_id(name: FunctionName, version: int) -> FunctionId:
    """The id of one version of a function."""
    return FunctionId(f"{name}@{version}")


def split_id(id_: FunctionId) -> tuple[FunctionName, int]:
    """The name and the version in an id."""
    name, _, version = id_.rpartition("@")
    return FunctionName(name), int(version)

"""Names of things, so that one cannot be passed for another."""

from typing import NewType

Seconds = NewType("Seconds", float)
Address = NewType("Address", str)
"""BLAKE3 of a block's content and layout: 64 hexadecimal digits."""
FunctionName = NewType("FunctionName", str)
FunctionId = NewType("FunctionId", str)
"""One version of a function: `name@version`."""
TenantId = NewType("TenantId", str)
RequestId = NewType("RequestId", int)
WorkerId = NewType("WorkerId", int)
RunId = NewType("RunId", int)


def function_id(name: FunctionName, version: int) -> FunctionId:
    """The id of one version of a function."""
    return FunctionId(f"{name}@{version}")


def split_id(id_: FunctionId) -> tuple[FunctionName, int]:
    """The name and the version in an id."""
    name, _, version = id_.rpartition("@")
    return FunctionName(name), int(version)

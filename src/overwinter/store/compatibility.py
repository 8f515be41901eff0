"""Reads data that an older version of Overwinter stored, so that a node can start with it.

A renamed setting gets its new name. A number outside today's bounds is replaced by the nearest allowed one, and
reported.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from overwinter.core.bounds import Bounds, brought_within
from overwinter.core.errors import CallerError
from overwinter.core.function import SETTINGS_BOUNDS, TIME_BOUNDS
from overwinter.core.ids import Address
from overwinter.core.pipeline import Pipeline, decode_pipeline
from overwinter.store.manifest import Manifest, decode_manifest

Stored = TypeVar("Stored")

_ADDRESS = re.compile(rb'"([0-9a-f]{64})"')
RENAMED = {"max_bodies": "max_workers"}
"""The old names of settings in manifests, and the current ones."""


def stored_manifest(data: bytes) -> tuple[Manifest, tuple[str, ...]]:
    """Decode a manifest of the catalog. Return it with a message for each setting that was brought within its bounds;
    raise CallerError if it is invalid otherwise.
    """
    return _stored(decode_manifest, data, SETTINGS_BOUNDS, "settings")


def stored_pipeline(data: bytes) -> tuple[Pipeline, tuple[str, ...]]:
    """Decode a pipeline of the catalog. Return it with a message for each number that was brought within its bounds;
    raise CallerError if it is invalid otherwise.
    """
    return _stored(decode_pipeline, data, TIME_BOUNDS)


def addresses_in(data: bytes) -> tuple[Address, ...]:
    """Return everything that looks like an address of a blob in a manifest that cannot be decoded."""
    return tuple(Address(found.decode()) for found in _ADDRESS.findall(data))


def _stored(
    decode: Callable[[bytes], Stored], data: bytes, bounds: Bounds, *path: str
) -> tuple[Stored, tuple[str, ...]]:
    try:
        return decode(data), ()
    except CallerError:
        today, notes = _migrated(data, bounds, path)
        return decode(today), notes


def _migrated(data: bytes, bounds: Bounds, path: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """Return data with today's names and numbers within the bounds; unchanged if it has another form."""
    try:
        whole = holder = msgspec.json.decode(data, type=dict[str, Any])
        for name in path:
            holder = holder[name]
        for name in RENAMED.keys() & holder.keys():
            holder.setdefault(RENAMED[name], holder.pop(name))
        numbers, notes = brought_within(holder, bounds)
    except (msgspec.MsgspecError, UnicodeError, LookupError, TypeError, AttributeError):
        return data, ()
    holder.update(numbers)
    return msgspec.json.encode(whole), notes

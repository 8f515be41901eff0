"""How is read what an older Overwinter kept? A node must start with what an older one took.

A setting that had another name is the one that has its place. A number outside today's bounds counts as the nearest
within them, and which ones do is told.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from overwinter.core.bounds import Bounds, brought_within
from overwinter.core.errors import CallerError
from overwinter.core.function import BOUNDS, TIMES
from overwinter.core.pipeline import Pipeline, decode_pipeline
from overwinter.store.manifest import Manifest, decode_manifest

Kept = TypeVar("Kept")

RENAMED = {"max_bodies": "max_workers"}
"""Settings that a function's manifest has had, and what they are called now."""


def kept_manifest(data: bytes) -> tuple[Manifest, tuple[str, ...]]:
    """A manifest of the catalog, and which of its settings were limited; CallerError."""
    return _kept(decode_manifest, data, BOUNDS, "settings")


def kept_pipeline(data: bytes) -> tuple[Pipeline, tuple[str, ...]]:
    """A pipeline of the catalog, and which of its numbers were limited; CallerError."""
    return _kept(decode_pipeline, data, TIMES)


def _kept(decode: Callable[[bytes], Kept], data: bytes, bounds: Bounds, *within: str) -> tuple[Kept, tuple[str, ...]]:
    try:
        return decode(data), ()
    except CallerError:
        today, told = _as_today(data, bounds, within)
        return decode(today), told


def _as_today(data: bytes, bounds: Bounds, within: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """With today's names, and numbers within the bounds; as it is where that cannot be its fault."""
    try:
        whole = holder = msgspec.json.decode(data, type=dict[str, Any])
        for name in within:
            holder = holder[name]
        for name in RENAMED.keys() & holder.keys():
            holder.setdefault(RENAMED[name], holder.pop(name))
        numbers, told = brought_within(holder, bounds)
    except (msgspec.MsgspecError, UnicodeError, LookupError, TypeError, AttributeError):
        return data, ()
    holder.update(numbers)
    return msgspec.json.encode(whole), told

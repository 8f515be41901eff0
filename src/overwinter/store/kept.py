"""How is read what was kept before today's bounds were drawn? Its numbers count as the nearest within them, and which
ones do is told: a node must start with what an older one took.
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
        limited, told = _limited(data, bounds, within)
        return decode(limited), told


def _limited(data: bytes, bounds: Bounds, within: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """With its numbers brought within the bounds; as it is where that cannot be its fault."""
    try:
        whole = holder = msgspec.json.decode(data, type=dict[str, Any])
        for name in within:
            holder = holder[name]
        numbers, told = brought_within(holder, bounds)
    except (msgspec.MsgspecError, UnicodeError, LookupError, TypeError, AttributeError):
        return data, ()
    holder.update(numbers)
    return msgspec.json.encode(whole), told

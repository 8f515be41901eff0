"""Restores a module after it was traced or run, including state that its own code caches.

A model that caches a tensor at its first call would keep a tensor of the tracer, which holds no numbers, and the
author's next call would fail. So the attributes and containers of the module are recorded before and restored after.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_OPAQUE = (torch.Tensor, type, ModuleType, FunctionType, MethodType, str, bytes, int, float, complex, type(None))
"""Objects that are not saved: they cannot change, or no model keeps a cache in them."""

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


@contextmanager
def restored(module: torch.nn.Module) -> Iterator[None]:
    """Restore, at the end, the content of the module's attributes, submodules and containers.

    It covers every `__dict__`, dictionary, list, set, deque and tuple that the module reaches without passing through
    an `_OPAQUE` object; writes to existing tensors are not undone.
    """
    saved = _saved(module)
    try:
        yield
    finally:
        for holder, content in saved:
            if not _is_same(holder, content):
                _put_back(holder, content)


def _saved(module: torch.nn.Module) -> list[tuple[Holder, Holder]]:
    """Return every container that the module reaches, with a shallow copy of its content."""
    saved: list[tuple[Holder, Holder]] = []
    seen: set[int] = set()
    waiting: list[Any] = [module]
    while waiting:
        found = waiting.pop()
        if isinstance(found, _OPAQUE) or id(found) in seen:
            continue
        seen.add(id(found))
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict):
            waiting.append(attributes)
        if isinstance(found, dict | list | set | deque):
            saved.append((found, _copy(found)))
        if isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list | set | deque | tuple):
            waiting.extend(found)
    return saved


def _copy(holder: Holder) -> Holder:
    match holder:
        case dict():
            return dict(holder.items())
        case list():
            return list(holder)
        case set():
            return set(holder)
        case _:
            return deque(holder)


def _is_same(holder: Holder, content: Holder) -> bool:
    """Whether a container still holds the same objects in the same order."""
    if isinstance(holder, dict) and isinstance(content, dict):
        before, after = [*content.keys(), *content.values()], [*holder.keys(), *holder.values()]
    else:
        before, after = list(content), list(holder)
    return [id(each) for each in before] == [id(each) for each in after]


def _put_back(holder: Holder, content: Holder) -> None:
    holder.clear()
    if isinstance(holder, dict | set):
        holder.update(content)
    else:
        holder.extend(content)

"""How is a module left as it was, whatever its own code keeps while it is traced?

A model that caches a tensor at its first call would keep one of the tracer's, which holds no numbers: the author's next
call would fail. So everything that the module holds and that can change is noted before, and put back after.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_OPAQUE = (torch.Tensor, type, ModuleType, FunctionType, MethodType, str, bytes, int, float, complex, type(None))
"""Nothing in these is noted: they cannot change, or are nobody's cache."""

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


@contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Put back, at the end, what the module's attributes, submodules and containers held at the beginning.

    Followed are the attributes of every object that the module reaches, and dictionaries, lists, sets, deques and
    tuples; what is written into a tensor that was there before is not undone.
    """
    noted = _noted(module)
    try:
        yield
    finally:
        for holder, content in noted:
            if not _is_same(holder, content):
                _put_back(holder, content)


def _noted(module: torch.nn.Module) -> list[tuple[Holder, Holder]]:
    """Every container that the module reaches, with a shallow copy of its content."""
    noted: list[tuple[Holder, Holder]] = []
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
            noted.append((found, _copy(found)))
        if isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list | set | deque | tuple):
            waiting.extend(found)
    return noted


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
    """Whether a container still holds the very things that it held, in the same order."""
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

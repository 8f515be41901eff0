"""A queue of functions, by tenant. So that a step takes a bounded time, it usually looks only at the first functions of
each tenant, and at some further ones while a device stays free.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from overwinter.core.ids import FunctionId, TenantId, slice_number

if TYPE_CHECKING:
    from overwinter.scheduler.state import Function

CHECKED = 256
"""The most functions of a tenant that a step compares. In `benchmarks.torpor` at most 37 of 560 functions wait for a
device, and 230 of 960, with which the node is overloaded.
"""
SLICE_COUNT = 32
"""A slice of a program counts as this many functions: where it runs depends on the others of its program."""
BLOCKS_CHECKED = 1 << 16
"""The most blocks of these functions: a step looks each of them up on each device."""


class FunctionQueue(msgspec.Struct):
    """Waiting functions, those of each tenant in the order in which they joined or were last moved to the end."""

    of_tenants: "dict[TenantId, dict[FunctionId, Function]]" = msgspec.field(default_factory=dict)
    """Only tenants with waiting functions."""

    def __len__(self) -> int:
        return sum(map(len, self.of_tenants.values()))

    def __bool__(self) -> bool:
        return bool(self.of_tenants)

    def __iter__(self) -> "Iterator[Function]":
        for functions in self.of_tenants.values():
            yield from functions.values()

    def join(self, function: "Function") -> bool:
        """Add a function behind the others of its tenant; return False if it was there."""
        functions = self.of_tenants.setdefault(function.spec.tenant, {})
        is_new = function.spec.id not in functions
        functions[function.spec.id] = function
        return is_new

    def leave(self, function: "Function") -> None:
        """Remove a function, if it is there."""
        functions = self.of_tenants.get(function.spec.tenant, {})
        if functions.pop(function.spec.id, None) is not None and not functions:
            del self.of_tenants[function.spec.tenant]

    def requeue(self, function: "Function") -> None:
        """Move a function to the end of a long queue after its turn, so that those behind it are looked at too."""
        functions = self.of_tenants.get(function.spec.tenant, {})
        if function.spec.id in functions and len(_first(functions)) < len(functions):
            functions[function.spec.id] = functions.pop(function.spec.id)

    def end_turn(self, function: "Function") -> None:
        """Move a function to the end of its tenant's functions, and the tenant behind the others, because a device is
        assigned to the functions that share an executor with it (`DeviceOwner`).
        """
        functions = self.of_tenants.pop(function.spec.tenant, None)
        if functions is None:
            return
        self.of_tenants[function.spec.tenant] = functions
        if function.spec.id in functions:
            functions[function.spec.id] = functions.pop(function.spec.id)

    def first(self, tenant: TenantId | None = None, id_: FunctionId | None = None) -> "Iterator[Function]":
        """Yield the first functions of each tenant, or only of this tenant, or only this function."""
        if tenant is None:
            for functions in self.of_tenants.values():
                yield from _first(functions)
            return
        functions = self.of_tenants.get(tenant, {})
        if id_ is None:
            yield from _first(functions)
        elif id_ in functions:
            yield functions[id_]

    def count(self, tenant: TenantId | None = None, id_: FunctionId | None = None) -> int:
        """Return the number of waiting functions of all tenants or of one, or whether one function waits (1 or 0)."""
        if tenant is None:
            return len(self)
        functions = self.of_tenants.get(tenant, {})
        return len(functions) if id_ is None else int(id_ in functions)

    def further(self, tenants: Container[TenantId | None], bytes_max: int) -> "list[Function]":
        """Return some functions of these tenants that `first` does not yield and that have at most `bytes_max` bytes,
        and move them behind the others, so that a later call returns others. If `tenants` contains None: of all
        tenants.
        """
        found: list[Function] = []
        for tenant, functions in self.of_tenants.items():
            if len(found) < CHECKED and (tenant in tenants or None in tenants):
                behind = list(functions.values())[len(_first(functions)) :]
                fitting = (each for each in behind if each.pool is not None and each.pool.nbytes <= bytes_max)
                some = _first_of(fitting)
                for each in some:
                    functions[each.spec.id] = functions.pop(each.spec.id)
                found += some
        return found


def _first(functions: "Mapping[FunctionId, Function]") -> "list[Function]":
    """Return the first functions of a tenant, as many as a step compares."""
    return _first_of(functions.values())


def _first_of(functions: "Iterable[Function]") -> "list[Function]":
    """Return the first of these functions, which count as at most CHECKED and have at most BLOCKS_CHECKED blocks, but
    at least one.
    """
    found: list[Function] = []
    count = blocks = 0
    for function in functions:
        count += SLICE_COUNT if function.spec.following or slice_number(function.spec.id) else 1
        blocks += len(function.sizes)
        if found and (count > CHECKED or blocks > BLOCKS_CHECKED):
            break
        found.append(function)
    return found

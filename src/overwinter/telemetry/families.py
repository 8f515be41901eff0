"""Describes families for queries: which functions share workers, and which functions each worker has bound.

Used on the loop only, because it reads the scheduler's tables.
"""

from collections.abc import Iterable

import msgspec

from overwinter.core.ids import FunctionId, FunctionName, TenantId
from overwinter.scheduler.snapshot import FamilyWorker, family_name, family_worker
from overwinter.scheduler.state import Function, Worker


class FamilyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that share workers."""

    name: FunctionId
    members: tuple[FunctionId, ...]
    """The first one first."""
    workers: tuple[FamilyWorker, ...]


def family_names(functions: Iterable[Function]) -> dict[tuple[TenantId, FunctionName], FunctionId]:
    """The family of the last of these versions of each function."""
    return {(each.spec.tenant, each.spec.name): family_name(each.family) for each in functions}


def family_facts(function: Function) -> FamilyFacts:
    """The function's family."""
    family = function.family
    workers = tuple(family_worker(worker) for worker in workers_of(function))
    return FamilyFacts(name=family_name(family), members=tuple(family.members), workers=workers)


def workers_of(function: Function) -> list[Worker]:
    """The workers of a function's family, and those of a former family that it is leaving."""
    return list((function.family.workers | function.workers).values())

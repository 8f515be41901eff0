"""Which functions share workers, and which of them does each worker have? For people and programs that ask.

A family goes by the name of its first member; a function that shares with nobody is a family of its own.
"""

from collections.abc import Iterable

import msgspec

from overwinter.core.ids import FunctionId, FunctionName, TenantId, WorkerId
from overwinter.scheduler.lifecycles import worker_state
from overwinter.scheduler.state import Family, Function, State, Worker


class FamilyWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, and what it can run at once without a bind."""

    worker: WorkerId
    family: FunctionId
    state: str
    bound: tuple[FunctionId, ...]
    """In the order in which they were bound, those that are just being bound or let go among them."""


class FamilyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that share workers."""

    name: FunctionId
    members: tuple[FunctionId, ...]
    """The first one first."""
    workers: tuple[FamilyWorker, ...]


def family_name(family: Family) -> FunctionId:
    """The first member."""
    return next(iter(list(family.members)), FunctionId(family.id))


def family_names(functions: Iterable[Function]) -> dict[tuple[TenantId, FunctionName], FunctionId]:
    """The family of the last of these versions of each function."""
    return {(each.spec.tenant, each.spec.name): family_name(each.family) for each in functions}


def family_facts(function: Function) -> FamilyFacts:
    """The function's family."""
    family = function.family
    workers = tuple(family_worker(worker) for worker in workers_of(function))
    return FamilyFacts(name=family_name(family), members=tuple(family.members), workers=workers)


def workers_of(function: Function) -> list[Worker]:
    """The workers of a function's family, and those of another that it leaves."""
    return list((function.family.workers.copy() | function.workers.copy()).values())


def every_worker(state: State) -> list[FamilyWorker]:
    """All workers of the node."""
    return [family_worker(worker) for worker in list(state.workers.values())]


def family_worker(worker: Worker) -> FamilyWorker:
    """What one worker has."""
    return FamilyWorker(
        worker=worker.id,
        family=family_name(worker.family),
        state=worker_state(worker),
        bound=tuple(worker.bound),
    )

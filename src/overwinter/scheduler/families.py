"""Assigns functions to families: when they join and leave, and what a family has in common.

The configuration of workers, the rate and the scaling belong to a family. They use the shortest SLO of its members and
the sum of their `max_workers`. Queue, SLO, forecast, backoff and being out of service belong to a function.
"""

from functools import partial
from heapq import nsmallest
from itertools import islice
from math import inf

import msgspec

from overwinter.core.function import FunctionSpec, Settings
from overwinter.core.ids import FamilyId, Seconds
from overwinter.scheduler import policy_failures
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.latency import LatencyModel, sizes_of
from overwinter.scheduler.limits import why_no_device
from overwinter.scheduler.pool import PoolRecord
from overwinter.scheduler.request import Request
from overwinter.scheduler.state import Family, Function, Worker

NO_SLO_S = 2.0
"""The seconds from its arrival after which a request without an SLO is due."""
MARKED_MAX = 64
"""The most functions of each kind that `mark` marks if more than this many wait: those that are due first, those that a
worker has bound, and those to be woken.
"""


def latency_model(cycle: Cycle, spec: FunctionSpec) -> LatencyModel:
    """Return the latency model for the profile and settings of a function. If their numbers make the model fail, the
    function is recorded as faulty, and the model has neither.
    """
    try:
        return LatencyModel(spec, cycle.policy, cycle.config.memory_bytes, cycle.config.cores)
    except policy_failures.FAILURES as error:
        policy_failures.remember_failure(cycle.state, spec.id, error)
        return LatencyModel(msgspec.structs.replace(spec, profile=None, settings=Settings()), cycle.policy)


def join(cycle: Cycle, spec: FunctionSpec, on_trial: bool) -> Function:
    """Add a new function to its family."""
    in_workers = not spec.on_pool
    family_id = spec.family if in_workers else FamilyId(f"{spec.family} on devices")
    id_ = family_id if cycle.policy.binds and spec.family else FamilyId(spec.id)
    family = cycle.state.families.get(id_)
    if family is None:
        family = cycle.state.families[id_] = Family(id_, latency_model(cycle, spec), used_at=cycle.now)
        profiled = None
    else:
        profiled = spec if spec.profile is not None and not family.latency.points else family.first_member.spec
    function = Function(spec, family, on_trial, sizes_of(spec.blobs), cycle.now)
    function.last_worker_before = cycle.last_worker
    if not in_workers:
        function.pool = _new_pool_record(cycle, spec)
        cycle.state.pool.record_use(function)
    family.members[spec.id] = function
    function.trunk = family.trunks.join(spec.id, function.sizes)
    _count_settings(family, spec.settings, 1)
    _settings_changed(cycle, family, profiled)
    return function


def _new_pool_record(cycle: Cycle, spec: FunctionSpec) -> PoolRecord:
    """Return the record of a new function of the pool."""
    sizes = spec.weights
    nbytes = sum(sizes.values())
    return PoolRecord(sizes, nbytes, why_no_device(cycle.config.devices, spec.id, nbytes))


def leave(cycle: Cycle, function: Function) -> None:
    """Remove the function from its family."""
    family, state = function.family, cycle.state
    del family.members[function.spec.id]
    _count_settings(family, function.spec.settings, -1)
    family.trunks[function.trunk].waiting.pop(function.spec.id, None)
    family.trunks.leave(function.trunk)
    family.waiting.pop(function.spec.id, None)
    family.wanting_idle_worker.pop(function.spec.id, None)
    family.waking.pop(function.spec.id, None)
    if family.members:
        _settings_changed(cycle, family, family.first_member.spec)
        # Workers that it waited for may be free.
        cycle.mark(family.first_member)
        if family.check_at is not None:
            cycle.timers.arm(family.first_member.spec.id, family.check_at)
    elif state.families.get(family.id) is family:
        del state.families[family.id]


def isolate(cycle: Cycle, function: Function) -> None:
    """Move the function to a separate family."""
    family = function.family
    leave(cycle, function)
    spec = function.spec = msgspec.structs.replace(function.spec, family=FamilyId(""))
    function.family = Family(FamilyId(spec.id), latency_model(cycle, spec), used_at=function.used_at)
    function.family.start_s = family.start_s
    function.family.latency.keep_observations(family.latency)
    function.family.members[spec.id] = function
    function.trunk = function.family.trunks.join(spec.id, function.sizes)
    cycle.state.families[function.family.id] = function.family
    _count_settings(function.family, spec.settings, 1)
    _settings_changed(cycle, function.family, None)
    record_waiting(cycle, function)


def record_waiting(cycle: Cycle, function: Function) -> None:
    """Record in the family whether the function has waiting requests or is to be woken."""
    id_, family = function.spec.id, function.family
    if function.queue:
        family.waiting[id_] = family.trunks[function.trunk].waiting[id_] = None
        # During a backoff no worker is started or bound for it. Those that have it may run it: see `is_wanted`.
        if function.waits_in in ("capacity", "bytes") or cycle.now < function.backoff_until:
            family.wanting_idle_worker.pop(id_, None)
        else:
            family.wanting_idle_worker[id_] = None
    elif id_ in family.waiting:
        del family.waiting[id_]
        family.trunks[function.trunk].waiting.pop(id_, None)
        family.wanting_idle_worker.pop(id_, None)
    if function.wants_wake:
        family.waking[id_] = None
    elif family.waking:
        family.waking.pop(id_, None)


def is_wanted(worker: Worker) -> bool:
    """Whether waiting requests could run in this worker as soon as it has a core: those of its family, or those of a
    function that backs off and is bound in it.
    """
    family = worker.family
    if family.wanting_idle_worker or not family.waiting:
        return bool(family.wanting_idle_worker)
    # A family and a worker may have thousands of functions, but seldom many that wait and are bound.
    bound = family.waiting.keys() & worker.bound.keys()
    return any(family.members[id_].waits_in not in ("capacity", "bytes") for id_ in bound)


def use_profile(cycle: Cycle, family: Family, spec: FunctionSpec, forget: bool = False) -> None:
    """Use a new profile for the functions of the family; `forget`: discard the observations of their runs."""
    before = family.latency
    if spec.settings.slo_ms != family.slo_ms:
        spec = msgspec.structs.replace(spec, settings=msgspec.structs.replace(spec.settings, slo_ms=family.slo_ms))
    family.latency = latency_model(cycle, spec)
    if not forget:
        family.latency.keep_observations(before)


def mark(cycle: Cycle, family: Family, *functions: Function) -> None:
    """Mark the family's functions that have waiting requests or are to be woken, by priority and due time, because a
    worker may be available; and mark `functions`. If more than MARKED_MAX wait, only the MARKED_MAX bound ones that are
    due first are marked, and of those that a worker can bind now, the MARKED_MAX that are due first and MARKED_MAX of
    those to be woken.
    """
    if not family.waiting and not family.waking:
        for each in functions:
            cycle.mark(each)
        return
    marked = [family.members[id_] for id_ in family.waiting | family.waking]
    if len(marked) > MARKED_MAX:
        urgency = partial(_urgency, cycle)
        bound = nsmallest(MARKED_MAX, (each for each in marked if each.workers), urgency)
        able = [each for each in marked if not _waits_for_other_events(cycle, each)]
        waking = islice((each for each in able if each.spec.id in family.waking), MARKED_MAX)
        marked = [*nsmallest(MARKED_MAX, able, urgency), *bound, *waking]
    marked = list(dict.fromkeys([*marked, *functions]))
    if len(marked) > 1:
        marked.sort(key=lambda each: _urgency(cycle, each))
    for each in marked:
        cycle.mark(each)


def _waits_for_other_events(cycle: Cycle, function: Function) -> bool:
    """Whether no worker can bind it before its load, space for its blocks, or the end of its backoff."""
    return function.loading is not None or function.waits_in == "bytes" or cycle.now < function.backoff_until


def due_at(spec: FunctionSpec, arrived: Seconds) -> float:
    """The due time of a request of this function that arrived at `arrived`."""
    slo_ms = spec.settings.slo_ms
    return arrived + (NO_SLO_S if slo_ms is None else slo_ms / 1000)


def has_slo(function: Function, request: Request) -> bool:
    """Whether a request has an SLO: its function's or, if it is a stage of a pipeline, the pipeline's."""
    return function.spec.settings.slo_ms is not None or request.due != due_at(function.spec, request.arrived)


def _urgency(cycle: Cycle, function: Function) -> tuple[float, float]:
    if not function.queue:
        return inf, inf
    first = cycle.state.requests[function.queue[0]]
    return first.level, first.due


def _count_settings(family: Family, settings: Settings, members: int) -> None:
    """Add (1) or remove (-1) a member's settings: a family may have thousands of members."""
    family.max_workers += members * settings.max_workers
    family.keep_alive_members += members * (settings.keep_alive_s is not None)
    if settings.slo_ms is not None:
        family.slos_ms[settings.slo_ms] += members
        if not family.slos_ms[settings.slo_ms]:
            del family.slos_ms[settings.slo_ms]


def _settings_changed(cycle: Cycle, family: Family, profiled: FunctionSpec | None) -> None:
    """The members of the family changed; `profiled`: the function whose profile a new latency model uses, if one is
    needed.
    """
    before = family.slo_ms
    family.slo_ms = min(family.slos_ms, default=None)
    had_points = bool(family.latency.points)
    if profiled is not None and (before != family.slo_ms or (profiled.profile is not None and not had_points)):
        slowdown = family.latency.slowdown
        use_profile(cycle, family, profiled)
        family.latency.slowdown = slowdown if had_points else 1.0

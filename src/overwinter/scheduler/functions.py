"""The lifecycle of a function as its owner sees it: deployed, loaded, unloaded, removed, failed, out of service."""

from math import inf

from overwinter.core.actions import LoadFinished
from overwinter.core.errors import no_function
from overwinter.core.events import Deployed
from overwinter.core.ids import FunctionId, Seconds
from overwinter.core.versions import Versions
from overwinter.scheduler import counterpart, device_ahead, families, fixed_devices, order, policy_failures, residency
from overwinter.scheduler.answers import forget_tenant, refuse_queue, refuse_unloaded
from overwinter.scheduler.backoff import backoff_s
from overwinter.scheduler.binding import stop_using
from overwinter.scheduler.blocks import hold, release
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import watch_deadlines
from overwinter.scheduler.state import Function


def deploy(cycle: Cycle, event: Deployed) -> None:
    """Add a version. It replaces a previous one that has the same id."""
    state, spec = cycle.state, event.function
    before = state.functions.get(spec.id)
    if before is not None:
        forget(cycle, before, "it was deployed again")
    function = families.join(cycle, spec, event.on_trial)
    state.functions[spec.id] = function
    state.tenant(spec.tenant).functions[spec.id] = None
    if event.resident:
        hold(cycle, function)
        function.loaded = True
        device_ahead.blocks_loaded(cycle, function)
    if event.quarantined:
        state.faults[spec.id] = event.quarantined
    if not function.on_trial:
        _publish(cycle, function)
    elif function.pool is not None and function.loaded:
        prove(cycle, function)
    cycle.mark(function)


def prove(cycle: Cycle, function: Function) -> None:
    """Report that a worker has bound the function, or that its blocks are loaded for devices: a new version becomes
    available under its name.
    """
    if function.on_trial:
        _publish(cycle, function)
    function.on_trial = function.awaited = False
    cycle.actions.append(LoadFinished(function.spec.id))


def load(cycle: Cycle, id_: FunctionId) -> None:
    """Wake the function for a caller. LoadFinished answers the caller when the function is awake or cannot be."""
    function = cycle.state.functions.get(id_)
    if function is None:
        cycle.actions.append(LoadFinished(id_, "NotFoundError", str(no_function(id_))))
        return
    if function.unloaded:
        function.unloaded = False
        if function.fault:
            function.fault = ""
            families.use_profile(cycle, function.family, function.spec, forget=True)
        families.mark(cycle, function.family)
    # A worker that drains after an unload does not serve the function again: the worker has mapped blocks that the
    # unload dropped, which nothing counts or verifies.
    if function.is_ready:
        cycle.actions.append(LoadFinished(id_))
    else:
        function.awaited = True
    cycle.mark(function)


def unload(cycle: Cycle, id_: FunctionId) -> None:
    """The function releases its memory and accepts no requests until it is loaded again; its runs may still end."""
    function = cycle.state.functions.get(id_)
    if function is not None and not function.on_trial and not function.unloaded:
        _set_unloaded(cycle, function, "ConflictError", f"function {id_} was unloaded during its load")


def remove(cycle: Cycle, id_: FunctionId) -> None:
    """Remove a function at its owner's request."""
    function = cycle.state.functions.get(id_)
    if function is not None:
        forget(cycle, function)


def forget(cycle: Cycle, function: Function, reason: str = "") -> None:
    """Remove a function from the tables; a run in progress may still end."""
    id_, spec, state = function.spec.id, function.spec, cycle.state
    message = f"function {id_} was removed{': ' if reason else ''}{reason}"
    if function.wants_wake:
        cycle.actions.append(LoadFinished(id_, "NotFoundError", message))
    refuse_queue(cycle, function, "NotFoundError", message)
    _release_all(cycle, function, "its function was removed")
    cycle.changed.pop(id_, None)
    del state.functions[id_]
    del state.tenant(spec.tenant).functions[id_]
    function.removed = cycle.ahead_due = True
    state.pool.waiting_for_workers.leave(function)
    state.core_queue.for_workers.pop(id_, None)
    if function.pool is not None:
        state.pool.forget(function)
    if state.pool.with_answers.pop(id_, None) is not None:
        state.pool.required.pop(id_, None)
        state.pool.is_boundary_stale = True
    families.leave(cycle, function)
    for worker in function.workers.values():
        watch_deadlines(cycle, worker)
    forget_tenant(cycle, spec.tenant)
    versions = state.versions.get(spec.name)
    if versions is None or spec.version not in versions.numbers:
        return
    versions.discard(spec.version)
    if not versions.numbers:
        del state.versions[spec.name]
    if spec.on_pool:
        return
    state.proven[spec.tenant, spec.program] -= 1
    if not state.proven[spec.tenant, spec.program]:
        del state.proven[spec.tenant, spec.program]


def fail(cycle: Cycle, function: Function, error: str, reason: str) -> None:
    """Handle a failure of the function, for example of a load, a start or a worker: the function backs off; a version
    on trial is removed.
    """
    if function.wants_wake:
        cycle.actions.append(LoadFinished(function.spec.id, error, reason))
        function.awaited = False
    if function.on_trial:
        function.on_trial = False
        forget(cycle, function, reason)
        return
    function.failures += 1
    function.backoff_until = Seconds(cycle.now + backoff_s(function.failures, cycle.config))
    cycle.timers.arm(function.spec.id, function.backoff_until)
    cycle.mark(function)


def give_up(cycle: Cycle, function: Function, why: str) -> None:
    """Refuse the loads of a function that can never get the resources it needs, and the requests that its counterpart
    cannot serve.
    """
    order.leave(cycle, function)
    function.load_again = False
    counterpart.refuse_waiting(cycle, function, "NoSpaceError", why, cycle.config.retry_after_min_s)
    fail(cycle, function, "NoSpaceError", why)


def quarantine(cycle: Cycle) -> None:
    """Take the functions in the table `faults` out of service; remove those on trial."""
    faults = cycle.state.faults
    while faults:
        id_ = next(iter(faults))
        fault = policy_failures.fault_text(id_, faults.pop(id_))
        function = cycle.state.functions.get(id_)
        if function is None:
            continue
        cycle.explain(function, "quarantine", fault)
        if function.on_trial:
            fail(cycle, function, "QuarantineError", fault)
            continue
        function.fault = fault
        counterpart.hand_over(cycle, function)
        if not function.unloaded:
            _set_unloaded(cycle, function, "QuarantineError", fault)


def _set_unloaded(cycle: Cycle, function: Function, error: str, reason: str) -> None:
    """Unload the function; `reason` is for callers that wait for its load."""
    refuse_unloaded(cycle, function)
    if function.awaited:
        function.awaited = False
        cycle.actions.append(LoadFinished(function.spec.id, error, reason))
    function.unloaded = True
    for worker in function.workers.values():
        worker.bound[function.spec.id].unloaded = True
    for operation in cycle.state.pool.runs_of(function):
        operation.unloaded += (function.spec.id,)
    _release_all(cycle, function, "its function was unloaded")
    watch(cycle, function)
    cycle.mark(function)


def _release_all(cycle: Cycle, function: Function, why: str) -> None:
    """Release all that a function holds: its workers (busy ones within the drain timeout) and its blocks."""
    state = cycle.state
    cycle.timers.disarm(function.spec.id)
    order.leave(cycle, function)
    function.load_again = False
    if function.spec.id == state.releasing:
        state.releasing, cycle.bytes_changed = None, True
    for worker in list(function.workers.values()):
        stop_using(cycle, worker, function, why, Seconds(cycle.now + cycle.config.drain_timeout_s))
    if function.pool is not None:
        residency.drain_runs(cycle, function)
    release(cycle, function)
    if function.pool is not None:
        function.pool.fixed_device, cycle.devices_changed = None, True
        state.pool.departures += 1


def _publish(cycle: Cycle, function: Function) -> None:
    spec, state = function.spec, cycle.state
    state.versions.setdefault(spec.name, Versions()).add(spec.version)
    # A trial does not run the program on a device.
    if not spec.on_pool:
        state.proven[spec.tenant, spec.program] += 1


def watch(cycle: Cycle, function: Function) -> None:
    """Set the function's timer to the earliest of its pending times."""
    times: list[float] = [request.deadline for request in cycle.state.open_requests(function)]
    if function.backoff_until > cycle.now:
        times.append(function.backoff_until)
    keep_alive_s = cycle.config.host_keep_alive_s
    if keep_alive_s is not None and function.loaded and function.kept_since + keep_alive_s > cycle.now:
        times.append(function.kept_since + keep_alive_s)
    check_at = function.family.check_at if function.family.first_member is function else None
    times += [at for at in (function.batch_at, check_at) if at is not None]
    bound_until = inf if function.pool is None else fixed_devices.ends_at(cycle, function)
    if bound_until < inf:
        times.append(bound_until)
    if times:
        cycle.timers.arm(function.spec.id, min(times))

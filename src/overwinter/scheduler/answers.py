"""Adds requests to the tables, and removes them with their answers."""

from overwinter.core.actions import Refuse
from overwinter.core.ids import FunctionId, RequestId, TenantId, is_part, whole_names
from overwinter.scheduler import handler_calls
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.request import Request
from overwinter.scheduler.resources import request_owner
from overwinter.scheduler.state import Function


def open_request(cycle: Cycle, request: Request) -> None:
    """Add a request that is not answered yet."""
    cycle.state.requests[request.id] = request
    cycle.ledger.take(request_owner(request.id), request.tenant, cycle.resources.of_request)
    if request.caller is not None:
        handler_calls.begin(cycle, request.caller)


def close_request(cycle: Cycle, id_: RequestId) -> Request | None:
    """Remove an answered, refused or cancelled request; None if it was already removed."""
    request = cycle.state.requests.pop(id_, None)
    if request is not None:
        cycle.ledger.release(request_owner(id_))
        if request.caller is not None:
            handler_calls.end(cycle, request.caller)
        forget_tenant(cycle, request.tenant)
    return request


def refuse(
    cycle: Cycle,
    id_: RequestId,
    error: str,
    message: str,
    retry_after_s: float | None = None,
    function: FunctionId | None = None,
) -> None:
    """Refuse a request with `message`. `function`: the function of a request that is not in the tables."""
    request = close_request(cycle, id_)
    if request is not None:
        function = request.function
    if function is not None and not is_part(function):
        # Callers do not know that the program of a function may be a function of its own.
        message = whole_names(message, function)
    cycle.actions.append(Refuse(id_, error, message, retry_after_s, function))


def refuse_queue(
    cycle: Cycle, function: Function, error: str, message: str, retry_after_s: float | None = None
) -> None:
    """Refuse all waiting requests of a function."""
    while function.queue:
        refuse(cycle, function.queue.popleft(), error, message, retry_after_s)


def expire(cycle: Cycle, id_: RequestId) -> None:
    """Refuse a request whose deadline has passed."""
    request = cycle.state.requests[id_]
    waited = f"{cycle.now - request.arrived:.3f} s"
    refuse(cycle, id_, "DeadlineError", f"the request for function {request.function} was not answered within {waited}")


def refuse_unloaded(cycle: Cycle, function: Function) -> None:
    """Refuse all waiting requests, because the function is unloaded or out of service."""
    error, message = why_unloaded(function)
    refuse_queue(cycle, function, error, message, cycle.config.retry_after_min_s)


def why_unloaded(function: Function) -> tuple[str, str]:
    """The error for a request to a function that is unloaded or out of service, and what to do."""
    if function.fault:
        return "QuarantineError", function.fault
    return "OverloadedError", f"function {function.spec.id} is unloaded; load it first"


def forget_tenant(cycle: Cycle, id_: TenantId) -> None:
    """Remove the record of a tenant that has nothing left."""
    tenant = cycle.state.tenants.get(id_)
    if tenant is None or tenant.functions:
        return
    if not cycle.resources.workers.of(id_) and not cycle.resources.requests.of(id_):
        del cycle.state.tenants[id_]

"""Converts errors to HTTP responses."""

import logging
import math
import re

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from overwinter.api.access import CALLER, Caller
from overwinter.api.exchange import FIELDS, REQUEST_ID, REQUEST_ID_MAX, Response, json_response
from overwinter.core.errors import OverloadedError, OverwinterError, UnauthorizedError
from overwinter.node.log_throttle import LogThrottle

NUMBER = re.compile(r"\d+")

_log = logging.getLogger("overwinter.api")


def refusal_log() -> LogThrottle:
    """The log of the requests that are refused because the node is full."""
    return LogThrottle(_log.warning)


def answer_error(scope: Scope, error: Exception, refusals: LogThrottle) -> Response:
    """The answer to a request that failed. An unexpected error is logged; so is a refusal by a full node, with what is
    full.
    """
    if isinstance(error, HTTPException):
        return _no_operation(scope)
    if not isinstance(error, OverwinterError):
        log_unexpected(scope, error)
    elif error.totals:
        # The totals without their numbers name what is full. The log is throttled: any caller can cause refusals.
        caller, kind = scope.get(CALLER), NUMBER.sub("", error.totals)
        tenant = None if caller is None else caller.tenant
        refusals.log((tenant, kind), f"a request was refused: {error.text_for_administrator()}")
    # The frames of the traceback refer to the request's data and to the error: a cycle that would keep the data until
    # the next garbage collection.
    error.__traceback__ = None
    return error_response(error, scope.get(CALLER))


def log_unexpected(scope: Scope, error: Exception) -> None:
    """Log an error that no caller and no author caused, with its traceback, the function and the id of the request."""
    name, request_id = scope.get("path_params", {}).get("name"), scope[FIELDS].get(REQUEST_ID, b"")
    about = {"function": name, "request": request_id[:REQUEST_ID_MAX].decode(errors="replace")}
    _log.error("a request failed unexpectedly", exc_info=error, extra=about)


def text_of_unexpected(error: Exception) -> str:
    """Return the text of such an error for the caller, who may not read more of it."""
    return f"internal error ({type(error).__name__}); see the node's log"


def _no_operation(scope: Scope) -> Response:
    """Return the answer for an HTTPException of Starlette's routes: 404 for an unknown path, 405 for another method."""
    path, method = scope["path"], scope["method"]
    allowed = sorted(
        {
            method
            for route in scope["app"].routes
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
            for method in route.methods or ()
        }
    )
    if not allowed:
        return json_response({"error": f"there is nothing at {path!r}; GET /v2 describes this node"}, 404)
    response = json_response({"error": f"{path!r} does not take {method}; it takes {', '.join(allowed)}"}, 405)
    response.raw_headers.append((b"allow", ", ".join(allowed).encode()))
    return response


def error_response(error: Exception, caller: Caller | None = None) -> Response:
    """Return `{"error": text}`, with the names in the text as the caller knows them, the status of the error's class,
    and `Retry-After` if the error gives a time to wait or is an OverloadedError.
    """
    if not isinstance(error, OverwinterError):
        return json_response({"error": text_of_unexpected(error)}, 500)
    text = str(error) or type(error).__name__
    response = json_response({"error": text if caller is None else caller.translated(text)}, error.status)
    if error.retry_after_s is not None or isinstance(error, OverloadedError):
        # The header counts whole seconds; 0 would cause retries without a pause.
        seconds = max(1, math.ceil(error.retry_after_s or 1))
        response.raw_headers.append((b"retry-after", b"%d" % seconds))
    if isinstance(error, UnauthorizedError):
        response.raw_headers.append((b"www-authenticate", b'Bearer realm="overwinter"'))
    return response

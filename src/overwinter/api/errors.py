"""How does an error become an HTTP response?"""

import logging
import math

from overwinter.api.exchange import Response, json_response
from overwinter.core.errors import OverloadedError, OverwinterError, UnauthorizedError

_log = logging.getLogger("overwinter.api")


def error_response(error: Exception) -> Response:
    """`{"error": text}` with the status that says whose fault it is, and `Retry-After` where waiting helps."""
    if not isinstance(error, OverwinterError):
        _log.error("a request failed in a way nobody foresaw", exc_info=error)
        return json_response({"error": f"internal error ({type(error).__name__}); the node's log says more"}, 500)
    response = json_response({"error": str(error) or type(error).__name__}, error.status)
    if error.retry_after_s is not None or isinstance(error, OverloadedError):
        # The header counts whole seconds; 0 would ask for a busy loop.
        seconds = max(1, math.ceil(error.retry_after_s or 1))
        response.headers.append((b"retry-after", b"%d" % seconds))
    if isinstance(error, UnauthorizedError):
        response.headers.append((b"www-authenticate", b'Bearer realm="overwinter"'))
    return response

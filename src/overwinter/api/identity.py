"""Tokens and tenants in the headers by which a client says who it is.

The client checks them before the first request, because an HTTP library refuses a header with invalid characters in the
same way as a node that does not answer.
"""

import re

from overwinter.core.errors import CallerError
from overwinter.core.ids import NAME_PATTERN, NAME_RULE

_is_name = re.compile(NAME_PATTERN).match


def authorization(token: str | None) -> dict[str, str]:
    """Return the header with a token; nothing without one. An empty token, as in an unset variable of a shell, is none.
    Raises CallerError for one that no header can contain.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise CallerError("a token is printable ASCII without spaces at its ends; this one is not")
    return {"authorization": f"Bearer {token}"}


def checked_tenant(tenant: str) -> str:
    """Return the name of a tenant; raise CallerError if it is invalid."""
    if not _is_name(tenant):
        raise CallerError(f"{tenant[:80]!r} is not a valid tenant name: {NAME_RULE}")
    return tenant

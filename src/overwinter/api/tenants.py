"""For which tenant does a request speak, and may it change what it names?

A request with a token speaks for the token's tenant (`api/access.py`). On a node without tokens a header says the
tenant, and nothing proves it: that keeps honest tenants out of each other's way. There, running a function asks for no
tenant.
"""

import re

from overwinter.api.access import DEFAULT, TENANT
from overwinter.api.exchange import Request
from overwinter.core.errors import CallerError, ForbiddenError
from overwinter.core.ids import NAME_PATTERN, FunctionName, TenantId

HEADER = TENANT.decode()

_is_name = re.compile(NAME_PATTERN).match


def tenant_of(request: Request) -> TenantId:
    """The tenant of the request's token, or the one that it names, `default` without one; CallerError when that is no
    name.
    """
    if request.caller.tenant is not None:
        return request.caller.tenant
    tenant = request.headers.get(HEADER)
    if tenant is None:
        return DEFAULT
    if not _is_name(tenant):
        allowed = "lower-case letters, digits, dots, dashes and underscores, a letter or digit first"
        raise CallerError(f"{tenant[:80]!r} is no name of a tenant: {allowed}")
    return TenantId(tenant)


def check_tenant(tenant: TenantId, owner: TenantId, what: str) -> None:
    """ForbiddenError unless both are one."""
    if tenant != owner:
        raise ForbiddenError(f"{what} belongs to another tenant than {tenant!r}: name its tenant in {HEADER}")


def check_manifest(request: Request, tenant: TenantId, what: str) -> None:
    """ForbiddenError unless a manifest of this tenant is the request's; with a token `default` says nothing."""
    if request.caller.tenant is None or tenant != DEFAULT:
        check_tenant(tenant_of(request), tenant, what)


def check_owner(request: Request, name: FunctionName) -> None:
    """ForbiddenError unless a function or pipeline is the request's tenant's; NotFoundError."""
    check_tenant(tenant_of(request), request.caller.front.owner(name), repr(str(name)))

"""For which tenant does a request speak, and may it change what it names?

A request says its tenant in a header. Nothing proves it yet: it keeps honest tenants out of each other's way, and it is
where a token will be looked at. Running a function asks for no tenant.
"""

import re

from overwinter.api.exchange import Request
from overwinter.api.front import Front
from overwinter.core.errors import CallerError, ForbiddenError
from overwinter.core.ids import NAME_PATTERN, FunctionName, TenantId

HEADER = b"overwinter-tenant"
DEFAULT = TenantId("default")

_is_name = re.compile(NAME_PATTERN).match


def tenant_of(request: Request) -> TenantId:
    """The tenant that the request names, `default` without one; CallerError when it is no name."""
    said = request.headers.get(HEADER)
    if said is None:
        return DEFAULT
    tenant = said.decode("latin-1")
    if not _is_name(tenant):
        allowed = "lower-case letters, digits, dots, dashes and underscores, a letter or digit first"
        raise CallerError(f"{tenant[:80]!r} is no name of a tenant: {allowed}")
    return TenantId(tenant)


def check_tenant(tenant: TenantId, owner: TenantId, what: str) -> None:
    """ForbiddenError unless both are one."""
    if tenant != owner:
        raise ForbiddenError(f"{what} belongs to another tenant than {tenant!r}: name its tenant in {HEADER.decode()}")


def check_owner(request: Request, front: Front, name: FunctionName) -> None:
    """ForbiddenError unless a function or pipeline is the request's tenant's; NotFoundError."""
    check_tenant(tenant_of(request), front.owner(name), repr(str(name)))

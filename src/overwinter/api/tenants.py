"""Determines the tenant of a request, and whether it may change the function that it names.

A request with a token acts for the token's tenant, or with the scope `admin` for the tenant that its header names
(`api/access.py`). On a node without tokens a header names the tenant without proof, so the checks here only prevent
mistakes. On such a node, running a function needs no tenant.
"""

from overwinter.api.access import DEFAULT, TENANT
from overwinter.api.exchange import Request
from overwinter.api.identity import checked_tenant
from overwinter.core.errors import ForbiddenError
from overwinter.core.ids import FunctionName, TenantId

HEADER = TENANT.decode()


def tenant_of(request: Request) -> TenantId:
    """Return the tenant for which the request acts: by its token, its header, or `default`. Raises CallerError for an
    invalid name.
    """
    if request.caller.tenant is not None:
        return request.caller.tenant
    tenant = request.headers.get(HEADER)
    if tenant is None:
        return DEFAULT
    return TenantId(checked_tenant(tenant))


def check_tenant(tenant: TenantId, owner: TenantId, what: str) -> None:
    """Raise ForbiddenError unless both are the same tenant."""
    if tenant != owner:
        way = f"use its owner's token; without tokens, or with the scope admin, name the owner in the header {HEADER}"
        raise ForbiddenError(f"{what} does not belong to tenant {tenant!r}: {way}")


def check_manifest(request: Request, tenant: TenantId, what: str) -> None:
    """Raise ForbiddenError unless a manifest's tenant is the request's; with a token, `default` stands for the
    request's tenant.
    """
    if request.caller.tenant is None or tenant != DEFAULT:
        check_tenant(tenant_of(request), tenant, what)


def check_owner(request: Request, name: FunctionName) -> None:
    """Raise ForbiddenError unless a function or pipeline belongs to the request's tenant; raise NotFoundError if there
    is none.
    """
    check_tenant(tenant_of(request), request.caller.node.owner(name), repr(str(name)))

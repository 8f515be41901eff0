"""Authenticates the caller of a request and determines its tenant, before anything else of the request is handled.

Until the first token is created, a node does not authenticate: a request acts for the tenant that its header names.
From then on every request needs a token, except for the operations that need none (`api/operations.py`). A request with
a token acts for the token's tenant, or with the scope `admin` for the tenant that its header names. The token file is
checked for each request, so that a change by the administrator takes effect with the next request on any connection.
"""

import logging
from collections.abc import Mapping

import msgspec

from overwinter.api.audit import Audit, AuditRecord, time_text
from overwinter.api.node_interface import NodeInterface
from overwinter.api.rates import Rate
from overwinter.api.sites import HOST, Sites
from overwinter.api.tenancy import TenantNode
from overwinter.core.errors import CallerError, ForbiddenError, RateError, StoreError, UnauthorizedError
from overwinter.core.ids import TenantId
from overwinter.node import clock
from overwinter.node.log_throttle import LogThrottle
from overwinter.store.tokens import NO_TOKENS, SCOPES, KnownTokens, Quota, Scope, Token, TokenFile, is_tenant

AUTHORIZATION = b"authorization"
TENANT = b"overwinter-tenant"
ONCE = {HOST: "Host", AUTHORIZATION: "Authorization", TENANT: "Overwinter-Tenant"}
"""The headers that a request may have only once. With two, a proxy could check one, and the node use the other."""
DEFAULT = TenantId("default")
"""The tenant of a request without the header Overwinter-Tenant. With a token, this name stands for the token's tenant.
"""
DEFAULT_HEADER = DEFAULT.encode()
HEADER_MAX = 256
CALLER = "overwinter.caller"
"""The key of the request's caller in the ASGI scope."""
GRANTS_MAX = 4096
"""The most header values that are cached: one token can be written in many ways."""
INVALID = "this token is not valid: it was revoked, is of another node, or was not sent as Authorization: Bearer TOKEN"
UNREADABLE = "this node cannot read its tokens and refuses all requests until it can: the node's log says why"
UNREAD = object()
"""The version of the token file while its content is not known: no version of a file equals it."""
ABSENT = (
    "this node requires a token: send Authorization: Bearer TOKEN (--token or OVERWINTER_TOKEN on the command line)"
)

_log = logging.getLogger("overwinter.api")


class Caller(msgspec.Struct, frozen=True):
    """The tenant for which a request acts, and its view of the node."""

    node: NodeInterface
    tenant: TenantId | None = None
    """The tenant; None if the request needs no token: then its header names the tenant."""
    token: Token | None = None
    scopes: frozenset[Scope] = frozenset(SCOPES)
    """The scopes of the token; all if it has `admin`, or without a token."""

    def translated(self, text: str) -> str:
        """Replace the node's names in a text by those of the caller."""
        return self.node.names.translated(text) if isinstance(self.node, TenantNode) else text


class _Grant(msgspec.Struct, frozen=True):
    """The rights of a token."""

    caller: Caller
    tenant_header: bytes
    """The tenant, encoded as in the header."""
    rate: Rate | None


class Access:
    """Authenticates requests."""

    def __init__(
        self, node: NodeInterface, file: TokenFile | None = None, audit: Audit | None = None, sites: Sites | None = None
    ) -> None:
        """Create it. `file`: the tokens; without one no request is authenticated. `sites`: checks requests while the
        node requires no tokens. Raises StoreError when the file cannot be read.
        """
        self._node = node
        self._sites = sites
        self._file = file
        self._audit = audit
        self.anonymous = Caller(node)
        """The caller of requests that need no token."""
        self._known: KnownTokens = NO_TOKENS
        self._version: object = UNREAD
        self._required = False
        self._grants: dict[bytes, _Grant] = {}
        """The rights by the Authorization header, because hashing a token takes longer than the rest of the check."""
        self._rates: dict[TenantId, Rate] = {}
        self._unreadable = LogThrottle(_log.error)
        try:
            self._reload()
        except StoreError as error:
            # Who starts the node may know the reason.
            raise StoreError(str(error.__cause__)) from error

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller; raise UnauthorizedError, ForbiddenError, CallerError, RateError or StoreError."""
        self._reload()
        if not self._required:
            if self._sites is not None:
                self._sites.check(headers)
            return self.anonymous
        authorization = headers.get(AUTHORIZATION, b"")
        grant = self._grants.get(authorization) or self._authenticate(authorization)
        if grant.rate is not None and (wait_s := grant.rate.take(clock.now())):
            tenant = grant.caller.tenant
            raise RateError(f"tenant {tenant!r} may send {grant.rate.per_s:g} requests a second: wait", wait_s)
        tenant_header = headers.get(TENANT, grant.tenant_header)
        if tenant_header in (grant.tenant_header, DEFAULT_HEADER):
            return grant.caller
        return self._acting_for(grant, tenant_header.decode("latin-1"))

    def record(self, caller: Caller, method: str, path: str, client: str, status: int) -> None:
        """Write the result of a request into the audit log, if it had a token."""
        if self._audit is None or caller.token is None or caller.tenant is None:
            return
        token, at = caller.token, time_text(clock.wall())
        record = AuditRecord(
            at=at,
            by=token.id,
            label=token.label,
            tenant=caller.tenant,
            address=client,
            method=method,
            path=path,
            status=status,
        )
        self._audit.add(record, clock.now())

    def _reload(self) -> None:
        """Read the file again if it was replaced, or could not be read the last time. Raises StoreError."""
        if self._file is None:
            return
        try:
            # `version` is older than the content that is read below: if the file changes meanwhile, it is read again.
            if (version := self._file.version()) == self._version:
                return
            # Forget the old tokens first: they must not be valid even if reading the new file fails.
            self._grants.clear()
            self._known = NO_TOKENS
            # If reading fails, the old file may come back with its old version, and must be read again.
            self._version = UNREAD
            self._known = self._file.read()
        except StoreError as error:
            # The caller is not authenticated, so only the log gets the reason; another reason is logged at once.
            self._unreadable.log(str(error), f"cannot read the tokens, so all requests are refused: {error}")
            raise StoreError(UNREADABLE) from error
        self._version = version
        # Once tokens are required, removing the file does not make the node open.
        self._required |= self._known.required

    def _authenticate(self, authorization: bytes) -> _Grant:
        """Return the rights of the token in this header; raise UnauthorizedError."""
        if not authorization:
            raise UnauthorizedError(ABSENT)
        scheme, _, text = authorization.strip().partition(b" ")
        may_be = scheme.lower() == b"bearer" and len(authorization) <= HEADER_MAX
        token = self._known.find(text.strip()) if may_be else None
        if token is None:
            raise UnauthorizedError(INVALID)
        if len(self._grants) >= GRANTS_MAX:
            self._grants.clear()
        scopes = frozenset(SCOPES if "admin" in token.scopes else token.scopes)
        node = TenantNode(self._node, token.tenant, self._quota(token.tenant), is_admin="admin" in scopes)
        caller = Caller(node, token.tenant, token, scopes)
        grant = _Grant(caller, token.tenant.encode(), self._rate(token.tenant))
        self._grants[authorization] = grant
        return grant

    def _acting_for(self, grant: _Grant, name: str) -> Caller:
        """Return the caller that acts for another tenant, which only a token with the scope `admin` may. For any other
        token the error does not depend on whether the tenant exists.
        """
        mine = grant.caller
        if "admin" not in mine.scopes:
            raise ForbiddenError(f"this token is for tenant {mine.tenant!r} only")
        if not is_tenant(name):
            raise CallerError(f"{name[:80]!r} is not a tenant name")
        tenant = TenantId(name)
        return Caller(TenantNode(self._node, tenant, self._quota(tenant)), tenant, mine.token, mine.scopes)

    def _quota(self, tenant: TenantId) -> Quota:
        return self._known.quotas.get(tenant, Quota())

    def _rate(self, tenant: TenantId) -> Rate | None:
        """Return the rate limiter of a tenant, which all its tokens share; it is kept while the quota does not
        change.
        """
        per_s = self._quota(tenant).requests_per_s
        if per_s is None:
            return None
        rate = self._rates.get(tenant)
        if rate is None or rate.per_s != per_s:
            rate = self._rates[tenant] = Rate(per_s)
        return rate

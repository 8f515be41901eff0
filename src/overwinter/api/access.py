"""Authenticates the caller of a request and determines its tenant, before anything else of the request is handled.

As long as no token was ever created, a node does not authenticate: a request acts for the tenant that its header names.
From the first token on, every request needs a token, except for the operations that `api/operations.py` opens, and acts
within the token's tenant. The token file is checked for each request, so that a change by the operator takes effect
with the next request on any connection.
"""

from collections.abc import Mapping

import msgspec

from overwinter.api.audit import Audit, Line, said_at
from overwinter.api.front import Front
from overwinter.api.rates import Rate
from overwinter.api.tenancy import TenantFront
from overwinter.core.errors import CallerError, ForbiddenError, RateError, StoreError, UnauthorizedError
from overwinter.core.ids import TenantId
from overwinter.node import clock
from overwinter.store.tokens import NOTHING, SCOPES, Known, Quota, Scope, Token, TokenFile, is_tenant

AUTHORIZATION = b"authorization"
TENANT = b"overwinter-tenant"
DEFAULT = TenantId("default")
"""With a token this names no tenant: the token's own holds."""
DEFAULT_HEADER = DEFAULT.encode()
HEADER_MAX = 256
CALLER = "overwinter.caller"
"""Where in the scope lies for whom the request acts."""
SEEN_MAX = 4096
"""Headers whose tokens are remembered: one token may be written in many ways."""
INVALID = "this token is not valid: it was revoked, or is of another node"
UNREADABLE = "this node cannot read its tokens and lets nobody in; on its machine `overwinter token list` says why"
ABSENT = (
    "this node asks for a token: send Authorization: Bearer TOKEN (--token or OVERWINTER_TOKEN on the command line)"
)


class Caller(msgspec.Struct, frozen=True):
    """The tenant for which a request acts, and its view of the node."""

    front: Front
    tenant: TenantId | None = None
    """None: no tokens, so what its header says."""
    token: Token | None = None
    scopes: frozenset[Scope] = frozenset(SCOPES)
    """What it may do."""

    def told(self, text: str) -> str:
        """A text of the node, with the names as the caller knows them."""
        return self.front.names.told(text) if isinstance(self.front, TenantFront) else text


class _Grant(msgspec.Struct, frozen=True):
    """The rights of a token."""

    caller: Caller
    header: bytes
    """The tenant as a header has it."""
    rate: Rate | None


class Access:
    """Authenticates requests."""

    def __init__(self, front: Front, file: TokenFile | None = None, audit: Audit | None = None) -> None:
        """`file`: where tokens are; without one no request is authenticated. StoreError when it cannot be read."""
        self._front = front
        self._file = file
        self._audit = audit
        self.anybody = Caller(front)
        """For whom a request acts that needs no token."""
        self._known: Known = NOTHING
        self._version: object = None
        self._required = False
        self._seen: dict[bytes, _Grant] = {}
        """By the header's bytes: hashing a token takes longer than all the rest."""
        self._rates: dict[TenantId, Rate] = {}
        self._look()

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller of a request; UnauthorizedError, ForbiddenError, RateError, StoreError."""
        self._look()
        if not self._required:
            return self.anybody
        said = headers.get(AUTHORIZATION, b"")
        grant = self._seen.get(said) or self._admit(said)
        if grant.rate is not None and (wait_s := grant.rate.wait_s(clock.now())):
            tenant = grant.caller.tenant
            raise RateError(f"tenant {tenant!r} may send {grant.rate.per_s:g} requests a second: wait", wait_s)
        asked = headers.get(TENANT, grant.header)
        if asked in (grant.header, DEFAULT_HEADER):
            return grant.caller
        return self._speaking_for(grant, asked.decode("latin-1"))

    def record(self, caller: Caller, method: str, path: str, host: str, status: int) -> None:
        """Write the result of a call into the audit log, if it had a token."""
        if self._audit is None or caller.token is None or caller.tenant is None:
            return
        token, at = caller.token, said_at(clock.wall())
        line = Line(
            at=at,
            by=token.id,
            label=token.label,
            tenant=caller.tenant,
            caller=host,
            method=method,
            path=path,
            status=status,
        )
        self._audit.add(line, clock.now())

    def _look(self) -> None:
        """Read the file again if it was replaced."""
        if self._file is None or (version := self._file.version()) == self._version:
            return
        # Nobody is let in by what was true before, also if this fails.
        self._seen.clear()
        self._known = NOTHING
        # Older than what is read: if it changes meanwhile, it is read again.
        try:
            self._known = self._file.read()
        except StoreError as error:
            # Whoever asks is a stranger: the reason is for the operator.
            raise StoreError(UNREADABLE) from error
        self._version = version
        # A file that is gone opens no node.
        self._required |= self._known.asked

    def _admit(self, said: bytes) -> _Grant:
        """The rights of the token in this header; UnauthorizedError."""
        if not said:
            raise UnauthorizedError(ABSENT)
        scheme, _, text = said.strip().partition(b" ")
        may_be = scheme.lower() == b"bearer" and len(said) <= HEADER_MAX
        token = self._known.find(text.strip()) if may_be else None
        if token is None:
            raise UnauthorizedError(INVALID)
        if len(self._seen) >= SEEN_MAX:
            self._seen.clear()
        scopes = frozenset(SCOPES if "admin" in token.scopes else token.scopes)
        front = TenantFront(self._front, token.tenant, self._quota(token.tenant), operator="admin" in scopes)
        caller = Caller(front, token.tenant, token, scopes)
        grant = _Grant(caller, token.tenant.encode(), self._rate(token.tenant))
        self._seen[said] = grant
        return grant

    def _speaking_for(self, grant: _Grant, name: str) -> Caller:
        """The operator's rights for another tenant. For all other tokens the answer does not depend on whether the
        tenant exists.
        """
        mine = grant.caller
        if "admin" not in mine.scopes:
            raise ForbiddenError(f"this token speaks for tenant {mine.tenant!r} alone")
        if not is_tenant(name):
            raise CallerError(f"{name[:80]!r} is no name of a tenant")
        tenant = TenantId(name)
        return Caller(TenantFront(self._front, tenant, self._quota(tenant)), tenant, mine.token, mine.scopes)

    def _quota(self, tenant: TenantId) -> Quota:
        return self._known.quotas.get(tenant, Quota())

    def _rate(self, tenant: TenantId) -> Rate | None:
        """The rate limiter of a tenant, common to all its tokens; it survives a change of the file that does not change
        its quota.
        """
        per_s = self._quota(tenant).requests_per_s
        if per_s is None:
            return None
        rate = self._rates.get(tenant)
        if rate is None or rate.per_s != per_s:
            rate = self._rates[tenant] = Rate(per_s)
        return rate

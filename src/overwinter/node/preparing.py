"""Chooses the program that each tenant's zygote prepares next: one at a time, and only programs with short runs.

A zygote that warms up forks nothing, so the node knows what it works on, and lets the base zygote fork meanwhile. A
tenant without a zygote waits until one more is allowed; its workers compile for themselves.
"""

from typing import TypeVar

from overwinter.core.ids import Address, FunctionId, TenantId
from overwinter.node.registry import Registry
from overwinter.node.watching import Zygotes
from overwinter.worker.channel import ChannelClosedError, close_all
from overwinter.worker.messages import Forget, Prepare

Key = TypeVar("Key")


WANTED_MAX = 256
"""Functions of one tenant that wait to be prepared, and programs that wait to be let go; the one that waits longest
leaves."""


class Preparing:
    """The programs that each tenant wants prepared, in the order of the requests."""

    def __init__(self, zygotes: Zygotes, registry: Registry) -> None:
        self._zygotes = zygotes
        self._registry = registry
        self._wanted: dict[TenantId, dict[FunctionId, None]] = {}
        self._under_way: dict[TenantId, FunctionId] = {}
        self._unneeded: dict[TenantId, dict[Address, None]] = {}
        """Programs that a zygote holds, and was not told yet to let go."""

    def prepare(self, tenant: TenantId, function: FunctionId, forget: Address | None = None) -> None:
        """Let the tenant's zygote prepare a function's program as soon as it can, and drop another."""
        if forget is not None and tenant in self._zygotes.tenants:
            _line_up(self._unneeded.setdefault(tenant, {}), forget)
        _line_up(self._wanted.setdefault(tenant, {}), function)
        self.advance(tenant)

    def wants(self, tenant: TenantId) -> bool:
        """Whether the tenant's zygote is to prepare more than it works on."""
        return bool(self._wanted.get(tenant))

    def look(self) -> None:
        """Stop zygotes that are unused or too small; start preparations that are possible now."""
        tenants = self._registry.tenants()
        for tenant, zygote in list(self._zygotes.tenants.items()):
            # All go with a base that heard nothing when it was to end one.
            there = self._zygotes.tenants.get(tenant) is zygote
            if there and zygote.is_idle and (zygote.small or tenant not in tenants):
                self._zygotes.end(zygote)
        for tenant in list({**self._wanted, **self._unneeded}):
            if tenant in tenants:
                self.advance(tenant)
            else:
                self._wanted.pop(tenant, None)

    def advance(self, tenant: TenantId) -> None:
        """Start the tenant's next preparation, if possible."""
        self._let_go(tenant)
        if not self._wanted.get(tenant):
            self._wanted.pop(tenant, None)
            return
        zygote = self._zygotes.tenants.get(tenant)
        if zygote is None and self._zygotes.has_room():
            zygote = self._zygotes.begin(tenant, self._registry.room_of(tenant))
        while zygote is not None and zygote.can_fork and self._wanted.get(tenant):
            function = next(iter(self._wanted[tenant]))
            del self._wanted[tenant][function]
            found = self._registry.warm_up_of(function)
            if found is not None:
                load, bind, fds = found
                self._under_way[tenant] = function
                self._zygotes.prepare(zygote, Prepare(load, bind), fds)
                close_all(fds)

    def _let_go(self, tenant: TenantId) -> None:
        """Tell the tenant's zygote which programs it may drop, when it accepts messages."""
        zygote = self._zygotes.tenants.get(tenant)
        unneeded = self._unneeded.get(tenant, {})
        # While it warms up it hears nothing, and may have no room for more than so much.
        while zygote is not None and zygote.can_fork and unneeded:
            program = next(iter(unneeded))
            try:
                zygote.channel.send(Forget(program))
            except (ChannelClosedError, OSError):
                # At the next look, unless its end is on the way.
                return
            del unneeded[program]
        if not unneeded:
            self._unneeded.pop(tenant, None)

    def lost(self, tenant: TenantId | None) -> FunctionId | None:
        """A zygote ended; the program that it worked on comes last. All wanted programs are requested again."""
        if tenant is None:
            return None
        self._wanted.pop(tenant, None)
        self._unneeded.pop(tenant, None)
        return self._under_way.pop(tenant, None)


def _line_up(line: dict[Key, None], key: Key) -> None:
    line[key] = None
    if len(line) > WANTED_MAX:
        del line[next(iter(line))]

"""Chooses the program that each tenant's zygote compiles next, one at a time, among those that the scheduler asked for.

A zygote does not fork while it compiles a program. The node knows which zygotes compile, and lets the base zygote fork
meanwhile. A tenant without a zygote waits until one more is allowed; until then its workers compile their programs
themselves.
"""

from typing import TypeVar

from overwinter.core.ids import Address, FunctionId, TenantId
from overwinter.node.registry import Registry
from overwinter.node.zygotes import Zygotes
from overwinter.worker.channel import ChannelClosedError, close_all
from overwinter.worker.messages import Forget, Prepare

Key = TypeVar("Key")


WAITING_MAX = 256
"""The most functions of one tenant that wait for compilation, and the most programs that wait to be dropped; the oldest
are removed.
"""


class Preparing:
    """The programs to compile for each tenant, in the order in which the scheduler asked for them."""

    def __init__(self, zygotes: Zygotes, registry: Registry) -> None:
        self._zygotes = zygotes
        self._registry = registry
        self._waiting: dict[TenantId, dict[FunctionId, None]] = {}
        self._last_compiled: dict[TenantId, FunctionId] = {}
        """The function whose program each tenant's zygote was last told to compile."""
        self._unneeded: dict[TenantId, dict[Address, None]] = {}
        """The programs that a zygote should drop and was not told to drop yet."""

    def prepare(self, tenant: TenantId, function: FunctionId, forget: Address | None = None) -> None:
        """Let the tenant's zygote compile a function's program as soon as it can, and drop another program."""
        if forget is not None and tenant in self._zygotes.tenants:
            _enqueue(self._unneeded.setdefault(tenant, {}), forget)
        _enqueue(self._waiting.setdefault(tenant, {}), function)
        self.advance(tenant)

    def has_waiting(self, tenant: TenantId) -> bool:
        """Whether programs of the tenant wait for compilation."""
        return bool(self._waiting.get(tenant))

    def check(self) -> None:
        """Stop idle zygotes that are too small, failed to fork, or have a tenant without functions; start compilations
        that are possible now.
        """
        tenants = self._registry.tenants()
        for tenant, zygote in list(self._zygotes.tenants.items()):
            # Ending one zygote may have shown that the base zygote has ended, and all others with it.
            there = self._zygotes.tenants.get(tenant) is zygote
            if there and zygote.is_idle and (zygote.too_small or zygote.fork_failed or tenant not in tenants):
                self._zygotes.end(zygote)
        for tenant in list({**self._waiting, **self._unneeded}):
            if tenant in tenants:
                self.advance(tenant)
            else:
                self._waiting.pop(tenant, None)

    def advance(self, tenant: TenantId) -> None:
        """Start the tenant's next compilation, if possible."""
        self._forget_unneeded(tenant)
        if not self._waiting.get(tenant):
            self._waiting.pop(tenant, None)
            return
        zygote = self._zygotes.tenants.get(tenant)
        if zygote is None and self._zygotes.can_begin():
            zygote = self._zygotes.begin(tenant, self._registry.fork_limits_of(tenant))
        while zygote is not None and zygote.can_fork and self._waiting.get(tenant):
            function = next(iter(self._waiting[tenant]))
            del self._waiting[tenant][function]
            found = self._registry.preparation_of(function)
            if found is not None:
                load, bind, fds = found
                self._last_compiled[tenant] = function
                self._zygotes.prepare(zygote, Prepare(load, bind), fds)
                close_all(fds)

    def _forget_unneeded(self, tenant: TenantId) -> None:
        """Tell the tenant's zygote which programs to drop, when it accepts messages."""
        zygote = self._zygotes.tenants.get(tenant)
        unneeded = self._unneeded.get(tenant, {})
        # A zygote that compiles receives no messages, and its channel has limited capacity.
        while zygote is not None and zygote.can_fork and unneeded:
            program = next(iter(unneeded))
            try:
                zygote.channel.send(Forget(program))
            except (ChannelClosedError, OSError):
                # Retry at the next check, unless its exit arrives first.
                return
            del unneeded[program]
            for worker in zygote.workers.values():
                worker.dropped_by_zygote += 1
        if not unneeded:
            self._unneeded.pop(tenant, None)

    def lost(self, tenant: TenantId | None) -> FunctionId | None:
        """Forget the programs that an ended zygote was to compile, and return the function whose program it was last
        told to compile.
        """
        if tenant is None:
            return None
        self._waiting.pop(tenant, None)
        self._unneeded.pop(tenant, None)
        return self._last_compiled.pop(tenant, None)


def _enqueue(queue: dict[Key, None], key: Key) -> None:
    queue[key] = None
    if len(queue) > WAITING_MAX:
        del queue[next(iter(queue))]

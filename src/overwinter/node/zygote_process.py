"""The node's record of one zygote."""

import os
import subprocess
from typing import Literal, NamedTuple

from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.contained import ContainedProcess
from overwinter.node.process_identity import kill
from overwinter.worker.channel import Channel, connected
from overwinter.worker.messages import ForkWorker, FromZygote

Pending = WorkerId | Literal["up", "pong", "program"]
"""An answer that a zygote has yet to send: a worker, the report of its start, a pong, a compiled program."""
SLOW: frozenset[Pending] = frozenset(("up", "program"))
"""The answers that may take longer; the zygote does nothing else meanwhile."""
PENDING_MAX, TENANT_PENDING_MAX = 16, 8
"""With the first number of answers yet to send, a zygote is asked for no further process; with the second number for
one tenant, for none of that tenant. Processes forked ahead are exempt. A zygote forks a requested process even if
the node has stopped it before the fork, so this bounds such work.
"""


class ZygoteSettings(NamedTuple):
    """The settings of zygotes: the maximum number of tenants' zygotes, the timeouts, the additional imports of the base
    zygote, and whether it forks executors of GPUs.
    """

    zygotes_max: int = 32
    zygote_timeout_s: float = 5.0
    warm_up_timeout_s: float = 10.0
    start_timeout_s: float = 120.0
    imports: str = ""
    uses_gpus: bool = False


class ForkLimits(NamedTuple):
    """The private memory and address space of the largest worker that a zygote may fork.

    The default suffices for most functions, so that a larger function that is deployed later seldom needs another
    zygote.
    """

    memory_bytes: int = 4 << 30
    mapped_bytes: int = 8 << 30

    def allow(self, order: ForkWorker) -> bool:
        """Whether the worker is not larger."""
        return order.memory_bytes <= self.memory_bytes and order.mapped_bytes <= self.mapped_bytes


class ZygoteProcess:
    """The node's record of one zygote: its channel, its workers, its pending answers."""

    def __init__(self, tenant: TenantId | None, limits: ForkLimits | None) -> None:
        """Create the record; the base zygote has neither tenant nor limits. Raises OSError when the system has no
        descriptors or memory left.
        """
        self.tenant = tenant
        self.limits = limits
        self.number = 0
        """The number in the message by which the base zygote was asked to fork it."""
        self.process: subprocess.Popen[bytes] | None = None
        """The process that the node started for the base zygote: it waits for the zygote, or becomes it."""
        self.pid: int | None = None
        self.pidfd: int | None = None
        self.smaps: int | None = None
        self.workers: dict[WorkerId, ContainedProcess] = {}
        """The workers and executors that it was asked to fork, until their end is reported."""
        self.unreported_exits: set[WorkerId] = set()
        """The workers whose exit the kernel reported before the zygote."""
        self.pending: dict[Pending, int] = {}
        """The answers that it has yet to send, in the order of the requests, each with a number of checks: for the
        oldest, those since its request or the zygote's last answer; for the others 0.
        """
        self.unused_checks = 0
        """The checks since it last had something to do."""
        self.too_small = False
        """Whether a worker larger than its limits was requested."""
        self.preparation_timed_out = False
        self.fork_failed = False
        """Whether it is a tenant's zygote that failed to fork, and none of its workers has ended since then."""
        self.channel: Channel[FromZygote]
        self.channel, self.far_end = connected(FromZygote, fds_max=1, names_sender=True)  # type: ignore[arg-type]

    @property
    def can_fork(self) -> bool:
        """Whether a fork that is requested now is expected to begin at once."""
        is_slow = any(checks > 1 for checks in self.pending.values())
        return self.pid is not None and not self.fork_failed and not is_slow and not self.pending.keys() & SLOW

    def is_busy(self, tenant: TenantId | None) -> bool:
        """Whether it has too many answers yet to send to be asked for one more process of this tenant."""
        if len(self.pending) < TENANT_PENDING_MAX:
            return False
        own = sum(each == tenant for each in self.unreported_tenants())
        return len(self.pending) >= PENDING_MAX or own >= TENANT_PENDING_MAX

    def unreported_tenants(self) -> list[TenantId | None]:
        """Return the tenant of each process that it was asked for and has yet to report, itself included."""
        asked = [process.tenant for answer in self.pending if (process := self.workers.get(answer)) is not None]  # type: ignore[arg-type]
        return [*asked, self.tenant] if "up" in self.pending else asked

    @property
    def is_idle(self) -> bool:
        """Whether it is unused, apart from processes forked ahead."""
        return all(each.is_ahead for each in self.workers.values()) and not self.pending.keys() - {"pong"}

    def kill(self) -> None:
        """Kill its workers, and the zygote itself if it has reported its start."""
        if self.pidfd is not None:
            kill(self.pidfd)
        for process in self.workers.values():
            process.kill()

    def close(self) -> None:
        """Close the node's descriptors for the zygote."""
        self.channel.close()
        self.far_end.close()
        for fd in (self.smaps, self.pidfd):
            if fd is not None:
                os.close(fd)

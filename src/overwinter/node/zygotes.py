"""The node's record of one zygote."""

import os
import subprocess
from typing import Literal, NamedTuple

from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.proofs import kill
from overwinter.node.workers import WorkerProcess
from overwinter.worker.channel import Channel, pair
from overwinter.worker.messages import ForkWorker, FromZygote

Debt = WorkerId | Literal["up", "pong", "program"]
"""What a zygote was asked for and did not give yet: a worker, that it is there, an answer, a prepared program."""
SLOW: frozenset[Debt] = frozenset(("up", "program"))
"""What it may take longer for. It does nothing else meanwhile."""


class Room(NamedTuple):
    """Private memory and address space of the largest worker that a zygote may fork.

    At least as much as most functions need, so that a larger one that is deployed later seldom needs another zygote.
    """

    memory_bytes: int = 4 << 30
    mapped_bytes: int = 8 << 30

    def holds(self, order: ForkWorker) -> bool:
        """Whether the worker is no larger."""
        return order.memory_bytes <= self.memory_bytes and order.mapped_bytes <= self.mapped_bytes


class ZygoteProcess:
    """The node's record of one zygote: its channel, its workers, the answers it owes."""

    def __init__(self, tenant: TenantId | None, room: Room | None) -> None:
        """The base has neither. OSError when the system has no descriptors left."""
        self.tenant = tenant
        self.room = room
        self.number = 0
        """Of the order that the base forked it for."""
        self.process: subprocess.Popen[bytes] | None = None
        """If the node itself started it."""
        self.pid: int | None = None
        self.pidfd: int | None = None
        self.smaps: int | None = None
        self.workers: dict[WorkerId, WorkerProcess] = {}
        self.unheard: set[WorkerId] = set()
        """Workers whose end the kernel told: the zygote is to tell it too."""
        self.owed: dict[Debt, int] = {}
        """How many looks ago it was asked."""
        self.unused_looks = 0
        """Looks since it had something to do."""
        self.small = False
        """Whether a worker that it was to fork needed more room."""
        self.overran = False
        """Whether a warm-up did not end in time."""
        self.full = False
        """Whether it could not fork when it was asked last, and none of its workers ended since."""
        here, self.there = pair()
        here.setblocking(False)
        self.channel: Channel[FromZygote] = Channel(here, FromZygote, fds_max=1, names_sender=True)  # type: ignore[arg-type]

    @property
    def can_fork(self) -> bool:
        """Whether a fork that is requested now is expected to begin at once."""
        late = any(looks > 1 for debt, looks in self.owed.items())
        return self.pid is not None and not self.full and not late and not self.owed.keys() & SLOW

    @property
    def is_idle(self) -> bool:
        """Whether it is unused, apart from workers forked ahead."""
        return all(each.is_ahead for each in self.workers.values()) and not self.owed.keys() - {"pong"}

    def kill(self) -> None:
        """End it and its workers."""
        if self.pidfd is not None:
            kill(self.pidfd)
        for process in self.workers.values():
            process.kill()

    def close(self) -> None:
        """Close the node's resources of the zygote."""
        self.channel.close()
        self.there.close()
        for fd in (self.smaps, self.pidfd):
            if fd is not None:
                os.close(fd)

"""Who hears of bodies, and of what?"""

from typing import Protocol

from overwinter.core.ids import FunctionId, TenantId
from overwinter.node.bodies import BodyProcess
from overwinter.node.preparing import Source
from overwinter.worker.messages import Answer, Measured, Ready


class BodyStaff(Protocol):
    """Who hears of a body: the effects, or whoever measures it."""

    def body_ready(self, body: BodyProcess, ready: Ready) -> None:
        """The body is loaded."""
        ...

    def body_answered(self, body: BodyProcess, answer: Answer) -> None:
        """The body ran something; ValueError if the answer cannot be true."""
        ...

    def body_measured(self, body: BodyProcess, measured: Measured) -> None:
        """The body told of itself; ValueError if nobody asked."""
        ...

    def body_exited(self, body: BodyProcess, error: str, reason: str) -> None:
        """The body is gone."""
        ...


class Staff(BodyStaff, Source, Protocol):
    """Who hears of all the processes: the effects."""

    def body_waits(self, body: BodyProcess) -> None:
        """A body that was forked ahead can be taken over."""
        ...

    def zygote_lost(self, tenant: TenantId | None, culprit: FunctionId | None, overran: bool) -> None:
        """What was prepared for a tenant is gone, with None for all; `culprit` was being rehearsed, for too long if it
        overran.
        """
        ...

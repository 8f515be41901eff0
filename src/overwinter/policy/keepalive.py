"""How long an idle body stays, and which one leaves when another needs its room."""

from collections.abc import Iterable

from overwinter.core.ids import Seconds
from overwinter.policy.state import Body


def sleep_at(body: Body, keep_alive_s: float) -> Seconds:
    """When an idle body goes to sleep: a fixed keep-alive that restarts on reuse."""
    return Seconds(body.since + keep_alive_s)


def gives_way(bodies: Iterable[Body]) -> Body | None:
    """The idle body that has waited longest, or None."""
    idle = [body for body in bodies if body.state == "idle"]
    return min(idle, key=lambda body: (body.since, body.id), default=None)

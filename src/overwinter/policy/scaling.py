"""Whether a function gets another body."""

from overwinter.core.ids import Seconds
from overwinter.policy.state import Function, State


def wants_body(state: State, function: Function, now: Seconds) -> bool:
    """One more when requests wait, none is on its way (single flight), and limit and backoff allow it."""
    return (
        bool(function.queue)
        and function.state != "unloaded"
        and now >= function.rest_until
        and len(function.bodies) < function.spec.settings.max_bodies
        and not state.has_starting(function)
    )

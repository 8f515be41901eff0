"""Whether requests that wait get another body now, before the next look at the rate."""

from overwinter.core.ids import Seconds
from overwinter.core.policies import Policy
from overwinter.policy.state import Function, State

WAKE_S = 0.03
"""What a wake takes while nothing better is known."""


def may_start(function: Function, now: Seconds) -> bool:
    """Whether limit and backoff allow one more body."""
    return (
        function.state != "unloaded"
        and now >= function.rest_until
        and len(function.bodies) < function.spec.settings.max_bodies
    )


def wake_s(function: Function) -> Seconds:
    """How long a wake of the function takes."""
    profile = function.spec.profile
    return Seconds(WAKE_S if profile is None or profile.wake_s is None else profile.wake_s)


def wants_body(state: State, function: Function, policy: Policy, cores: int, now: Seconds) -> bool:
    """The first body always, when requests wait; another, one at a time, when a core is free for it and those that
    are there would keep the last request waiting longer than its promise, or than a wake takes.
    """
    if not function.queue or not may_start(function, now) or state.has_starting(function):
        return False
    ready = [body for worker in function.bodies if (body := state.bodies[worker]).state in ("idle", "busy")]
    if not ready:
        return True
    taken = state.reserved_cores if policy.reserves else state.running_cores + state.counts["starting"]
    if not policy.eager or taken >= cores or any(body.has_slot for body in ready):
        return False
    run_s = function.speeds.latency_s(ready[0].point, ready[0].point.batch)
    if run_s is None:
        # Nothing has run yet: what it costs to find out is a wake.
        return True
    at_once = sum(body.point.batch * body.point.concurrency for body in ready)
    wait_s = run_s * len(function.queue) / at_once
    slo_ms = function.spec.settings.slo_ms
    return wait_s > wake_s(function) and (slo_ms is None or wait_s + run_s > slo_ms / 1000)

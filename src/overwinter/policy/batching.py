"""When are waiting requests handed to a body, how many, and to which body?

Each rule sees how many wait, how long the first has waited, and the bodies that have a slot.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from overwinter.core.policies import Batching
from overwinter.policy.state import Body

SOON_S = 1e-6
"""A wait shorter than this is none: a clock may not be able to tell its end from its beginning."""

Latency = Callable[[Body, int], float]
"""Expected seconds of a run of so many requests in this body."""


class Waiting(msgspec.Struct, frozen=True):
    """What a rule may know. At least one request waits and at least one body has a slot."""

    count: int
    waited_s: float
    """How long the one that came first has waited."""
    slo_s: float
    latency: Latency
    keeps_up: bool = True
    """Whether bodies keep up with what comes even if each request runs alone."""


class Send(msgspec.Struct, frozen=True):
    """Hand requests to a body now."""

    body: Body
    count: int
    late: bool = False
    """They cannot all be in time: the newest `count` that can be are worth more than the oldest."""


class Wait(msgspec.Struct, frozen=True):
    """Wait for more requests, at most so long."""

    seconds: float


Step = Send | Wait
Rule = Callable[[Waiting, Sequence[Body]], Step]


def greedy(waiting: Waiting, bodies: Sequence[Body]) -> Send:
    """Whatever waits goes at once, to the body that does least; of those the one used last, so that others sleep."""
    body = min(bodies, key=lambda body: (len(body.runs), -body.since, -body.id))
    return Send(body, min(waiting.count, body.point.batch))


def adaptive(waiting: Waiting, bodies: Sequence[Body]) -> Step:
    """Small bodies first, and only when one more request would make it too late (AsyFunc, alg. 3)."""
    ordered = sorted(bodies, key=lambda body: (body.point.batch, body.point.cores, body.id))
    most = ordered[-1].point.batch
    if waiting.count >= most:
        body = next(body for body in ordered if body.point.batch == most)
        late = waiting.waited_s + waiting.latency(body, most) > waiting.slo_s
        return Send(body, most, late)
    fitting = [body for body in ordered if body.point.batch >= waiting.count]
    soonest = float("inf")
    for body in fitting:
        latency = waiting.latency(body, waiting.count)
        if waiting.waited_s + latency > waiting.slo_s:
            continue
        # (t_w + l)(1 + |Q|)/|Q| > t_slo holds from this t_w on.
        ripe = waiting.slo_s * waiting.count / (waiting.count + 1) - latency
        if ripe - waiting.waited_s < SOON_S:
            return Send(body, waiting.count)
        soonest = min(soonest, ripe - waiting.waited_s)
    if soonest == float("inf"):
        largest = max(ordered, key=lambda body: (body.point.cores, body.point.batch, -body.id))
        return Send(largest, min(waiting.count, largest.point.batch), late=True)
    return Wait(soonest)


def timeout(waiting: Waiting, bodies: Sequence[Body]) -> Step:
    """A full batch, or whatever waits once the promise leaves just the time of a full run (BATCH, INFless, Tetris)."""
    body = max(bodies, key=lambda body: (body.point.batch, -len(body.runs), -body.id))
    most = body.point.batch
    left = waiting.slo_s - waiting.latency(body, most) - waiting.waited_s
    if waiting.count >= most or left < SOON_S:
        return Send(body, min(waiting.count, most))
    return Wait(left)


def overwinter(waiting: Waiting, bodies: Sequence[Body]) -> Step:
    """At once while bodies keep up with single requests: waiting buys nothing then. Else adaptive."""
    if not waiting.keeps_up:
        return adaptive(waiting, bodies)
    send = greedy(waiting, bodies)
    late = waiting.waited_s + waiting.latency(send.body, send.count) > waiting.slo_s
    return Send(send.body, send.count, late)


def sound(step: Step, bodies: Sequence[Body]) -> Step:
    """The step itself; ValueError for one that nobody can take, and that would be asked for without an end."""
    if isinstance(step, Wait) and not SOON_S <= step.seconds < inf:
        raise ValueError(f"a wait of {step.seconds} s is none")
    if isinstance(step, Send) and (step.count < 1 or step.body not in bodies):
        raise ValueError(f"{step.count} requests cannot go to body {step.body.id}")
    return step


RULES: Mapping[Batching, Rule] = {
    "overwinter": overwinter,
    "greedy": greedy,
    "adaptive": adaptive,
    "timeout": timeout,
}

"""Policies for batching: when waiting requests are sent to a worker, how many, and to which worker.

Each policy sees the number of waiting requests, the waiting time of the first, and the workers with a free slot.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from overwinter.core.policies import Batching
from overwinter.scheduler.state import Worker

SOON_S = 1e-6
"""A wait shorter than this is none: a clock may not be able to tell its end from its beginning."""

Latency = Callable[[Worker, int], float]
"""Expected seconds of a run of so many requests in this worker."""


class Waiting(msgspec.Struct, frozen=True):
    """The input of a policy. At least one request waits and at least one worker has a free slot."""

    count: int
    waited_s: float
    """How long the one that came first has waited."""
    slo_s: float
    latency: Latency
    keeps_up: bool = True
    """Whether workers keep up with what comes even if each request runs alone."""


class Send(msgspec.Struct, frozen=True):
    """Send requests to a worker now."""

    worker: Worker
    count: int
    late: bool = False
    """They cannot all be in time: the newest `count` that can be are worth more than the oldest."""


class Wait(msgspec.Struct, frozen=True):
    """Wait for more requests, at most so long."""

    seconds: float


Step = Send | Wait
Rule = Callable[[Waiting, Sequence[Worker]], Step]


def greedy(waiting: Waiting, workers: Sequence[Worker]) -> Send:
    """All waiting requests are sent at once."""
    return at_once(waiting.count, workers)


def at_once(count: int, workers: Sequence[Worker]) -> Send:
    """So many requests go to the least busy worker; of equals the one used last, so that others can sleep."""
    worker = workers[0]
    if len(workers) > 1:
        worker = min(workers, key=lambda worker: (len(worker.runs), -worker.since, -worker.id))
    return Send(worker, min(count, worker.point.batch))


def adaptive(waiting: Waiting, workers: Sequence[Worker]) -> Step:
    """Small workers first, and only when one more request would make it too late (AsyFunc, alg. 3)."""
    ordered = sorted(workers, key=lambda worker: (worker.point.batch, worker.point.cores, worker.id))
    most = ordered[-1].point.batch
    if waiting.count >= most:
        worker = next(worker for worker in ordered if worker.point.batch == most)
        late = waiting.waited_s + waiting.latency(worker, most) > waiting.slo_s
        return Send(worker, most, late)
    fitting = [worker for worker in ordered if worker.point.batch >= waiting.count]
    soonest = float("inf")
    for worker in fitting:
        latency = waiting.latency(worker, waiting.count)
        if waiting.waited_s + latency > waiting.slo_s:
            continue
        # (t_w + l)(1 + |Q|)/|Q| > t_slo holds from this t_w on.
        ripe = waiting.slo_s * waiting.count / (waiting.count + 1) - latency
        if ripe - waiting.waited_s < SOON_S:
            return Send(worker, waiting.count)
        soonest = min(soonest, ripe - waiting.waited_s)
    if soonest == float("inf"):
        largest = max(ordered, key=lambda worker: (worker.point.cores, worker.point.batch, -worker.id))
        return Send(largest, min(waiting.count, largest.point.batch), late=True)
    return Wait(soonest)


def timeout(waiting: Waiting, workers: Sequence[Worker]) -> Step:
    """A full batch, or whatever waits once the SLO leaves just the time of a full run (BATCH, INFless, Tetris)."""
    worker = max(workers, key=lambda worker: (worker.point.batch, -len(worker.runs), -worker.id))
    most = worker.point.batch
    left = waiting.slo_s - waiting.latency(worker, most) - waiting.waited_s
    if waiting.count >= most or left < SOON_S:
        return Send(worker, min(waiting.count, most))
    return Wait(left)


def overwinter(waiting: Waiting, workers: Sequence[Worker]) -> Step:
    """At once while workers keep up with single requests: waiting buys nothing then. Else adaptive."""
    if not waiting.keeps_up:
        return adaptive(waiting, workers)
    send = greedy(waiting, workers)
    late = waiting.waited_s + waiting.latency(send.worker, send.count) > waiting.slo_s
    return Send(send.worker, send.count, late)


def sound(step: Step, workers: Sequence[Worker]) -> Step:
    """The step itself; ValueError for an impossible one, which would be requested without end."""
    if isinstance(step, Wait) and not SOON_S <= step.seconds < inf:
        raise ValueError(f"a wait of {step.seconds} s is none")
    if isinstance(step, Send) and (step.count < 1 or step.worker not in workers):
        raise ValueError(f"{step.count} requests cannot go to worker {step.worker.id}")
    return step


RULES: Mapping[Batching, Rule] = {
    "overwinter": overwinter,
    "greedy": greedy,
    "adaptive": adaptive,
    "timeout": timeout,
}

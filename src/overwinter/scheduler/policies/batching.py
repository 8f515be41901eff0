"""Policies for batching: when waiting requests are sent to a worker, how many, and to which worker.

Each policy sees the number of waiting requests, their longest waiting time, and the workers with a free slot.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from overwinter.core.policies import Batching
from overwinter.scheduler.state import Worker

SOON_S = 1e-6
"""Shorter waits are not made, because a clock may not distinguish their start and end."""

Latency = Callable[[Worker, int], float]
"""The expected seconds of a run of this many requests in this worker."""


class Waiting(msgspec.Struct, frozen=True):
    """The input of a policy. At least one request waits and at least one worker has a free slot."""

    count: int
    waited_s: float
    """The longest waiting time among the first requests of the queue, at most as many as the largest batch."""
    slo_s: float
    latency: Latency
    keeps_up: bool = True
    """Whether workers keep up with the arrivals even if each request runs alone."""


class Send(msgspec.Struct, frozen=True):
    """Send requests to a worker now."""

    worker: Worker
    count: int
    late: bool = False
    """Whether not all requests can meet their SLO: with `late = "refuse"` those that cannot are then refused."""


class Wait(msgspec.Struct, frozen=True):
    """Wait for more requests, at most this long."""

    seconds: float


Step = Send | Wait
Rule = Callable[[Waiting, Sequence[Worker]], Step]


def greedy(waiting: Waiting, workers: Sequence[Worker]) -> Send:
    """Send the waiting requests at once, at most a batch."""
    return at_once(waiting.count, workers)


def at_once(count: int, workers: Sequence[Worker]) -> Send:
    """Send this many requests, at most a batch, to the least busy worker; among equally busy ones, to the most
    recently used, so that the others stay idle.
    """
    worker = workers[0]
    if len(workers) > 1:
        worker = min(workers, key=lambda worker: (len(worker.runs), -worker.since, -worker.id))
    return Send(worker, min(count, worker.point.batch))


def adaptive(waiting: Waiting, workers: Sequence[Worker]) -> Step:
    """Send a full batch at once, to the smallest worker that answers it in time. Otherwise use small workers first, and
    only when waiting for one more request would be too late (AsyFunc, alg. 3).
    """
    ordered = sorted(workers, key=lambda worker: (worker.point.batch, worker.point.cores, worker.id))
    most = ordered[-1].point.batch
    if waiting.count >= most:
        full = [worker for worker in ordered if worker.point.batch == most]
        for worker in full:
            if waiting.waited_s + waiting.latency(worker, most) <= waiting.slo_s:
                return Send(worker, most)
        return Send(_with_most_cores(full), most, late=True)
    fitting = [worker for worker in ordered if worker.point.batch >= waiting.count]
    soonest = float("inf")
    for worker in fitting:
        latency = waiting.latency(worker, waiting.count)
        if waiting.waited_s + latency > waiting.slo_s:
            continue
        # From this waiting time t_w on, (t_w + l)(1 + |Q|)/|Q| > t_slo holds.
        send_at = waiting.slo_s * waiting.count / (waiting.count + 1) - latency
        if send_at - waiting.waited_s < SOON_S:
            return Send(worker, waiting.count)
        soonest = min(soonest, send_at - waiting.waited_s)
    if soonest == float("inf"):
        largest = _with_most_cores(ordered)
        return Send(largest, min(waiting.count, largest.point.batch), late=True)
    return Wait(soonest)


def _with_most_cores(workers: Sequence[Worker]) -> Worker:
    return max(workers, key=lambda worker: (worker.point.cores, worker.point.batch, -worker.id))


def timeout(waiting: Waiting, workers: Sequence[Worker]) -> Step:
    """Send a full batch, or all waiting requests once the SLO leaves only the time of a full run (BATCH, INFless,
    Tetris).
    """
    worker = max(workers, key=lambda worker: (worker.point.batch, -len(worker.runs), -worker.id))
    most = worker.point.batch
    left = waiting.slo_s - waiting.latency(worker, most) - waiting.waited_s
    if waiting.count >= most or left < SOON_S:
        return Send(worker, min(waiting.count, most))
    return Wait(left)


def overwinter(waiting: Waiting, workers: Sequence[Worker]) -> Step:
    """Send at once while workers keep up with single requests, because waiting has no benefit then; otherwise be
    adaptive.
    """
    if not waiting.keeps_up:
        return adaptive(waiting, workers)
    send = at_once(waiting.count, workers)
    late = waiting.waited_s + waiting.latency(send.worker, send.count) > waiting.slo_s
    return Send(send.worker, send.count, late) if late else send


def checked(step: Step, workers: Sequence[Worker]) -> Step:
    """Return the step; raise ValueError for an impossible one, which would be repeated forever."""
    if isinstance(step, Wait) and not SOON_S <= step.seconds < inf:
        raise ValueError(f"a wait of {step.seconds} s is not possible")
    if isinstance(step, Send) and (step.count < 1 or step.worker not in workers):
        raise ValueError(f"{step.count} requests cannot be sent to worker {step.worker.id}")
    return step


RULES: Mapping[Batching, Rule] = {
    "overwinter": overwinter,
    "greedy": greedy,
    "adaptive": adaptive,
    "timeout": timeout,
}

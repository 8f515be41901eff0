"""Refuses the late requests of a function that is set to refuse them, when its next run in a worker begins."""

from overwinter.core.ids import RequestId
from overwinter.scheduler import families
from overwinter.scheduler.answers import refuse
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.policies.batching import Send
from overwinter.scheduler.policy_failures import expected_s
from overwinter.scheduler.state import Function, Worker


def shed(cycle: Cycle, function: Function, send: Send) -> None:
    """Refuse requests that can no longer meet their SLO, so that others can (AsyFunc, alg. 3, lines 16-18).

    If all are late, the newest are still answered where otherwise none would ever be: after a cold start that takes
    longer than the SLO; and those whose due time has not passed if a single request is expected to take longer than the
    SLO, because only further runs can correct that estimate.
    """
    state, worker = cycle.state, send.worker
    slo_s = (function.spec.settings.slo_ms or 0.0) / 1000
    # Without requests of other functions that join: joining must not make a request too late.
    latency = expected_s(state, function, worker.point, min(send.count, len(function.queue))) or 0.0
    # The due time of a stage follows from the SLO of its pipeline.
    too_late = [id_ for id_ in function.queue if cycle.now + latency > state.requests[id_].due]
    run_s = expected_s(state, function, worker.point, 1) or 0.0
    if len(too_late) == len(function.queue):
        served: list[RequestId] = []
        # Those that arrived when the function was ready did not wait for a cold start.
        cold = [id_ for id_ in too_late if state.requests[id_].start != "warm"]
        if cold and _starts_cold(function, worker, slo_s - run_s):
            served = cold
        elif run_s > slo_s:
            served = [id_ for id_ in too_late if cycle.now < state.requests[id_].due]
        too_late = queueing.without_newest(too_late, served, send.count, state.requests)
    if too_late:
        cycle.explain(function, "shed", f"{len(too_late)} requests could no longer meet their SLO")
    queueing.remove_all(function.queue, too_late)
    for id_ in too_late:
        request = state.requests[id_]
        is_own = request.due == families.due_at(function.spec, request.arrived)
        slo = f"{slo_s * 1000:g} ms" if is_own else "the SLO of its pipeline"
        message = f"function {function.spec.id} can no longer answer this request within {slo}"
        refuse(cycle, id_, "OverloadedError", message, cycle.config.retry_after_min_s)


def _starts_cold(function: Function, worker: Worker, spare_s: float) -> bool:
    """Whether no earlier run could begin: the next one is the first since a load of the blocks, or in a new worker,
    whose start takes longer than `spare_s`.
    """
    if function.used_at < (function.blocks_usable_from or 0.0):
        return True
    is_new = worker.is_idle and worker.since == worker.ready_at
    return is_new and max(function.latency.wake_s, function.family.start_s or 0.0) > spare_s

"""Decides how many workers a family should have, and in which configurations, periodically and at a wake.

The rate is counted here and predicted by the configured predictor; the decision is made by a scaler of
`policies/scaling/`.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

import msgspec

from overwinter.core.ids import Seconds
from overwinter.core.profile import Configuration, Point
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import drain
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.policies.scaling.scaler import CurrentWorker, Scaled, ScalingInput
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.state import Family, Function, Worker

RATE_TIME_MIN_S = 0.25
"""The shortest time over which a rate is measured."""
LOW_RATE = 1e-3
"""The requests per second for which the only worker of a family at a low rate is configured."""


def count_arrival(cycle: Cycle, function: Function) -> None:
    """Count a request; the first after a pause begins a period."""
    family = function.family
    family.arrivals += 1
    if family.check_at is None:
        family.check_at = Seconds(cycle.now + cycle.policy.period_s)
        cycle.timers.arm(family.first_member.spec.id, family.check_at)


def end_period(cycle: Cycle, family: Family) -> Scaled | None:
    """Compare the rate with the capacity of the workers; None: no change."""
    family.rates.append(family.arrivals / cycle.policy.period_s)
    del family.rates[: -cycle.policy.history]
    family.arrivals, family.check_at = 0, None
    scaled: Scaled | None = None
    if family.latency.points and any(not worker.stopping for worker in family.workers.values()):
        function = next_to_start(cycle, family) or family.first_member
        scaled = call_policy(cycle.state, function, Scaled(), _by_rate, cycle, function)
    if any(family.rates) or _is_watched(cycle, family):
        family.check_at = Seconds(cycle.now + cycle.policy.period_s)
    return scaled


def _is_watched(cycle: Cycle, family: Family) -> bool:
    """Whether the family is checked without requests: several workers may be too many, a bound function may have been
    idle for too long, and a forecast may predict requests.
    """
    workers = family.workers.values()
    if family.latency.points and (len(workers) > 1 or (workers and cycle.predict is None)):
        return True
    bound = (binding.function for worker in workers for binding in worker.bound.values())
    return any(keepalive.at_most_s(function, cycle.policy) < inf for function in bound)


def next_to_start(cycle: Cycle, family: Family) -> Function | None:
    """Return the function for which a further worker of the family is forked: of those that can run, preferably with
    waiting requests, the most recently used one.
    """
    candidates = [each for each in family.members.values() if each.loaded and cycle.now >= each.backoff_until]
    return max(candidates, key=lambda each: (bool(each.queue), each.used_at), default=None)


def drain_surplus(cycle: Cycle, family: Family, scaled: Scaled) -> None:
    """Drain the workers that a scaler releases."""
    for id_ in scaled.stop:
        worker = family.workers.get(id_)
        if worker is not None:
            drain(cycle, worker, "fewer workers serve the rate")
    if scaled.stop:
        cycle.explain(family.first_member, "scale-in", scaling_text(cycle, family, f"{len(scaled.stop)} fewer"))


def scaling_text(cycle: Cycle, family: Family, change: str) -> str:
    """Format a change of the number of workers."""
    staying = (each for each in family.workers.values() if each.drain is None and not each.stopping)
    counts = Counter(worker.point.configuration for worker in staying)
    shown = ", ".join(f"{count} ({configuration.text()})" for configuration, count in counts.items()) or "none"
    return f"{change}, expecting {expected_rate(cycle, family):.2f} requests/s; workers: {shown}"


def expected_rate(cycle: Cycle, family: Family) -> float:
    """Return the expected requests per second."""
    if cycle.predict is None:
        return sum(each.forecast or 0.0 for each in family.members.values())
    return cycle.predict(family.rates) if family.rates else 0.0


def report_slo_infeasible(cycle: Cycle, function: Function, slo_infeasible: bool) -> None:
    """Record whether no configuration meets the SLO."""
    family, slo_ms = function.family, function.family.slo_ms
    slo_infeasible = slo_infeasible and slo_ms is not None
    if slo_infeasible and not family.slo_infeasible:
        fastest = min(point.latency_s for point in family.latency.points)
        why = f"no configuration meets {slo_ms:g} ms on this machine: the fastest takes {fastest * 1000:.1f} ms"
        cycle.explain(function, "slo-infeasible", f"{why}; it is served as fast as possible")
    family.slo_infeasible = slo_infeasible


def points_to_start(cycle: Cycle, function: Function) -> list[Point]:
    """Return the configurations of the workers to start for waiting requests, a trial or a load, at least one."""
    default = (function.latency.default_point.configuration,)
    configurations = call_policy(cycle.state, function, default, _configurations_to_start, cycle, function)
    return [function.latency.point(configuration) for configuration in configurations]


def _configurations_to_start(cycle: Cycle, function: Function) -> Sequence[Configuration]:
    """Return the scaler's answer for the expected rate, or for the current one if that is higher; if the function has a
    usable worker, with the rate of the backlog added. Where the scaler need not be asked, or starts nothing: the
    default configuration, or the one for a low rate.
    """
    latency = function.latency
    fallback = (latency.default_point.configuration,)
    if not latency.points or function.on_trial or not function.queue:
        return fallback
    rate = max(expected_rate(cycle, function.family), current_rate(cycle, function.family))
    if not function.has_usable_worker:
        fallback = (_low_rate_configuration(cycle, function),)
        if rate <= latency.low_rate_max and _fits(cycle, latency.point(fallback[0])):
            return fallback
    else:
        rate += _backlog_rate(cycle, function)
    scaled = cycle.scaler(_scaling_input(cycle, function, rate))
    report_slo_infeasible(cycle, function, scaled.slo_infeasible)
    return scaled.start or fallback


def _fits(cycle: Cycle, point: Point) -> bool:
    return all(each.fits(amount) for each, amount in cycle.resources.of_worker(point, point.memory_bytes).items())


def _low_rate_configuration(cycle: Cycle, function: Function) -> Configuration:
    """Return the configuration of the only worker at a low rate. It is computed once, because most functions never need
    a different one, and for an empty node, so that no temporary limit is remembered.
    """
    latency, config = function.latency, cycle.config
    if latency.low_rate_configuration is None:
        given = msgspec.structs.replace(
            _scaling_input(cycle, function, LOW_RATE),
            workers=(),
            free_cores=cycle.cores,
            free_workers=min(function.family.max_workers, cycle.workers_max),
            free_bytes=inf if config.memory_bytes is None else config.memory_bytes,
            free_runs=inf if config.runs_max is None else config.runs_max,
        )
        scaled = cycle.scaler(given)
        report_slo_infeasible(cycle, function, scaled.slo_infeasible)
        latency.low_rate_configuration = scaled.start[0] if scaled.start else latency.default_point.configuration
        point = latency.point(latency.low_rate_configuration)
        alone = latency.latency_s(point, 1)
        if alone and not scaled.slo_infeasible:
            latency.low_rate_max = cycle.policy.alpha * point.concurrency / alone
    return latency.low_rate_configuration


def _by_rate(cycle: Cycle, function: Function) -> Scaled | None:
    """Return the scaler's answer for the expected rate; None: it need not be called."""
    family = function.family
    rate = expected_rate(cycle, family)
    if len(family.workers) == 1 and rate <= family.latency.low_rate_max:
        [worker] = family.workers.values()
        if worker.point.configuration == family.latency.low_rate_configuration:
            return None
    scaled = cycle.scaler(_scaling_input(cycle, function, rate))
    report_slo_infeasible(cycle, function, scaled.slo_infeasible)
    return scaled


def current_rate(cycle: Cycle, family: Family) -> float:
    """Return the requests per second in the current period so far."""
    if family.check_at is None:
        return 0.0
    began = family.check_at - cycle.policy.period_s
    return family.arrivals / max(cycle.now - began, RATE_TIME_MIN_S)


def _backlog_rate(cycle: Cycle, function: Function) -> float:
    """Return the rate that would serve the waiting requests within their SLO, or within a period."""
    slo_ms, family = function.family.slo_ms, function.family
    others = (family.members[id_] for id_ in family.waiting if id_ != function.spec.id)
    waiting = len(function.queue) + sum(len(each.queue) for each in others)
    return waiting / (cycle.policy.period_s if slo_ms is None else slo_ms / 1000)


def _scaling_input(cycle: Cycle, function: Function, rate: float) -> ScalingInput:
    family, latency, policy, resources = function.family, function.latency, cycle.policy, cycle.resources
    live = [worker for worker in family.workers.values() if not worker.stopping]
    # A worker may be older than the last measurement of its configuration.
    measured = {point.configuration: point for point in latency.points}
    current = tuple(
        CurrentWorker(worker.id, measured.get(worker.point.configuration, worker.point), _load(worker), worker.since)
        for worker in live
        if worker.drain is None
    )
    if policy.reserves:
        free_cores = cycle.cores - resources.reserved.taken
    else:
        # Only this family's workers count: idle workers of other families use no cores.
        free_cores = cycle.cores - sum(worker.point.cores for worker in live)
    return ScalingInput(
        rate=rate,
        slo_s=None if family.slo_ms is None else family.slo_ms / 1000,
        points=latency.points,
        workers=current,
        free_cores=max(0, free_cores),
        free_workers=max(0, min(family.max_workers, cycle.workers_max) - len(family.workers)),
        free_bytes=resources.memory.free,
        free_runs=resources.runs.free,
        weight_bytes=latency.weight_bytes,
        macs=latency.macs,
        shared=policy.shares,
        alpha=policy.alpha,
        beta=policy.beta,
        gamma=policy.core_mib * (1 << 20),
    )


def keeps_up(cycle: Cycle, function: Function) -> bool:
    """Whether the workers keep up with the arrivals even if each request runs alone."""
    family = function.family
    need = family.rates[-1] / cycle.policy.alpha if family.rates else 0.0
    for worker in family.workers.values():
        if need <= 0:
            return True
        latency = family.latency.latency_s(worker.point, 1)
        if worker.is_serving and latency:
            need -= worker.point.concurrency / latency
    return need <= 0


def _load(worker: Worker) -> float:
    """Return the number of a worker's runs, divided by its concurrency."""
    return len(worker.runs) / worker.point.concurrency

"""Profiles, inputs of a scaler, and a node that carries out a scaler's decisions."""

import math

import msgspec
from hypothesis import strategies as st

from overwinter.core.ids import Seconds, WorkerId
from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.scaler import CurrentWorker, Scaled, ScalingInput

MIB = 1 << 20


def point(cores=1, mib=100, batch=1, concurrency=1, latency_s=0.1):
    return Point(cores, mib * MIB, batch, concurrency, latency_s)


def worker(worker, made_as, load=0.0, since=0.0):
    return CurrentWorker(WorkerId(worker), made_as, load, Seconds(since))


def scaling_input(rate, points, **changes):
    defaults = {
        "slo_s": 0.4,
        "free_cores": 64.0,
        "free_workers": 64,
        "free_bytes": math.inf,
        "weight_bytes": 100 * MIB,
        "macs": 4_000_000_000,
    }
    return ScalingInput(rate=rate, points=tuple(points), **(defaults | changes))


@st.composite
def profiles(draw):
    """Draw a profile like a real model's: cores speed up the parallel part of a run, batches help little or much, runs
    that share cores slow each other, and memory grows with the concurrent requests.
    """
    alone_s = draw(st.floats(0.005, 0.5))
    serial = draw(st.floats(0.05, 0.6))
    batching = draw(st.sampled_from([0.0, 0.1, 0.2, 0.8]))
    runtime, activations = draw(st.integers(20, 400)), draw(st.integers(1, 80))
    sides = draw(st.sampled_from([(1, 2), (1, 2, 4)]))
    return tuple(
        Point(
            cores,
            (runtime + activations * batch * concurrency) * MIB,
            batch,
            concurrency,
            alone_s
            * (1 + (batch - 1) * (1 - batching))
            * max(1, concurrency / cores)
            * (serial + (1 - serial) / max(1, cores / concurrency))
            * draw(st.floats(0.95, 1.1)),
        )
        for cores in sides
        for batch in sides
        for concurrency in sides
    )


@st.composite
def scaling_inputs(draw, bounded=None):
    """Draw a function with such a profile, with any workers, on a node with little or much memory."""
    points = draw(profiles())
    standing = draw(st.lists(st.sampled_from(points), max_size=6))
    workers = tuple(worker(number, each, draw(st.floats(0, 1)), number) for number, each in enumerate(standing))
    fastest, most = min(each.latency_s for each in points), max(each.throughput for each in points)
    few = draw(st.booleans()) if bounded is None else bounded
    return scaling_input(
        draw(st.floats(0, 8)) * most,
        points,
        slo_s=draw(st.none() | st.floats(0.5, 8).map(lambda times: times * fastest)),
        workers=workers,
        free_cores=float(draw(st.integers(0, 12))) if few else 1000.0,
        free_workers=draw(st.integers(0, 8)) if few else 1000,
        free_bytes=draw(st.floats(0, 3000)) * MIB if few else math.inf,
        free_runs=draw(st.integers(0, 16)) if few else math.inf,
        shared=draw(st.booleans()),
        gamma=draw(st.sampled_from([0.0, 50.0 * MIB])),
    )


def done(asked: ScalingInput, said: Scaled) -> ScalingInput:
    """Return the input after the node has carried out a decision."""
    by_configuration = {each.configuration: each for each in asked.points}
    stopped = [each for each in asked.workers if each.worker in said.stop]
    number = 1 + max((each.worker for each in asked.workers), default=0)
    started = [
        worker(number + place, by_configuration[configuration], since=number)
        for place, configuration in enumerate(said.start)
    ]
    change = [(1, each) for each in stopped] + [(-1, each) for each in started]
    return msgspec.structs.replace(
        asked,
        workers=(*(each for each in asked.workers if each not in stopped), *started),
        free_cores=asked.free_cores + sum(sign * each.point.cores for sign, each in change),
        free_workers=asked.free_workers + sum(sign for sign, _ in change),
        free_bytes=asked.free_bytes + sum(sign * asked.memory(each.point) for sign, each in change),
        free_runs=asked.free_runs + sum(sign * each.point.concurrency for sign, each in change),
    )

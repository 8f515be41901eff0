"""By which rules and with which workers is an application simulated, and what came of it?"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.cores import on_all_cores
from benchmarks.measure import MIB
from overwinter.core.policies import Policy
from overwinter.simulation.scenario import FunctionModel, Scenario
from overwinter.simulation.world import World
from overwinter.telemetry.report import Report

WORKER_MIB = 8.0
"""Measured (benchmarks.density): each further idle worker 7.9 MiB for BERT, 6.1 for VGG19."""
NODE_MIB = 184.0
"""Measured there: a node with its first worker, most of it its zygote. Counted whole for each application."""


class Contender(NamedTuple):
    """One row of a table."""

    policy: str | Policy
    own_workers: bool = False
    """Whether its workers have this project's memory, in place of the paper's."""


class Outcome(NamedTuple):
    """One application under one load by one policy, after the rise."""

    mean: float
    """MiB, as the next two."""
    median: float
    peak: float
    cores: float
    """Of all workers, on average."""
    workers: float
    """On average."""
    violations: float
    """Share of the application's requests."""
    lost: int


def simulate_all(tasks: Sequence[tuple[Scenario, Contender]]) -> list[Outcome]:
    """All simulations."""
    return on_all_cores(simulate, tasks)


def simulate(scenario: Scenario, contender: Contender) -> Outcome:
    """One simulation."""
    functions = scenario.functions
    if contender.own_workers:
        functions = tuple(own_workers(function) for function in functions)
    scheduler = msgspec.structs.replace(scenario.scheduler, policy=contender.policy)
    scenario = msgspec.structs.replace(scenario, scheduler=scheduler, functions=functions)
    return outcome(World(scenario).run(), scenario, NODE_MIB if contender.own_workers else 0.0)


def own_workers(function: FunctionModel) -> FunctionModel:
    """The same function in workers of this project: their runtime is the zygote's, and is not copied."""
    if function.law is None:
        raise ValueError(f"function {function.name} has no law by which its memory is known")
    law = msgspec.structs.replace(function.law, runtime_mib=WORKER_MIB)
    return msgspec.structs.replace(function, law=law)


def outcome(report: Report, scenario: Scenario, node_mib: float) -> Outcome:
    """What is told of one simulation."""
    samples = [each for each in report.samples if scenario.settle_s <= each.at_s <= scenario.duration_s]
    memory = [node_mib + (each.blocks_bytes + each.workers_bytes) / MIB for each in samples]
    figures = list(report.applications.values())
    asked = sum(each.requests for each in figures)
    within = sum((each.attainment or 0.0) * each.requests for each in figures)
    return Outcome(
        statistics.fmean(memory),
        statistics.median(memory),
        max(memory),
        statistics.fmean(each.worker_cores for each in samples),
        statistics.fmean(each.workers for each in samples),
        1 - within / asked,
        sum(each.lost for each in figures),
    )

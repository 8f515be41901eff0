"""The policies and workers with which an application is simulated, and the results."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.measure import MIB
from benchmarks.parallel import on_all_cores
from overwinter.core.policies import Policy
from overwinter.simulation.models import FunctionModel
from overwinter.simulation.scenario import Scenario
from overwinter.simulation.world import World
from overwinter.telemetry.report import Report

WORKER_MIB = 8.0
"""Measured by benchmarks.density: each further idle worker takes 7.9 MiB for BERT, 6.1 for VGG19."""
NODE_MIB = 184.0
"""Measured by benchmarks.density: a node with its first worker, mostly its zygote. It is counted in full for each
application.
"""


class Contender(NamedTuple):
    """One row of a table."""

    policy: str | Policy
    own_workers: bool = False
    """Whether its workers have this project's memory rather than the paper's."""


class Outcome(NamedTuple):
    """One application under one load with one policy, from the scenario's `settle_s` on."""

    mean: float
    """The mean memory in MiB, like the next two."""
    median: float
    peak: float
    cores: float
    """The mean cores of all workers."""
    workers: float
    """The mean number of workers."""
    violations: float
    """The share of the application's requests that missed their SLO."""
    lost: int


def simulate_all(tasks: Sequence[tuple[Scenario, Contender]]) -> list[Outcome]:
    """Run all simulations."""
    return on_all_cores(simulate, tasks)


def simulate(scenario: Scenario, contender: Contender) -> Outcome:
    """Run one simulation."""
    functions = scenario.functions
    if contender.own_workers:
        functions = tuple(own_workers(function) for function in functions)
    scheduler = msgspec.structs.replace(scenario.scheduler, policy=contender.policy)
    scenario = msgspec.structs.replace(scenario, scheduler=scheduler, functions=functions)
    return outcome(World(scenario).run(), scenario, NODE_MIB if contender.own_workers else 0.0)


def own_workers(function: FunctionModel) -> FunctionModel:
    """Return the same function in workers of this project, which share the zygote's runtime."""
    if function.law is None:
        raise ValueError(f"function {function.name} has no law by which its memory is known")
    law = msgspec.structs.replace(function.law, runtime_mib=WORKER_MIB)
    return msgspec.structs.replace(function, law=law)


def outcome(report: Report, scenario: Scenario, node_mib: float) -> Outcome:
    """Return the figures of one simulation."""
    samples = [each for each in report.samples if scenario.settle_s <= each.at_s <= scenario.duration_s]
    memory = [node_mib + (each.blocks_bytes + each.workers_bytes) / MIB for each in samples]
    figures = list(report.applications.values())
    requests = sum(each.requests for each in figures)
    within = sum((each.attainment or 0.0) * each.requests for each in figures)
    return Outcome(
        statistics.fmean(memory),
        statistics.median(memory),
        max(memory),
        statistics.fmean(each.worker_cores for each in samples),
        statistics.fmean(each.workers for each in samples),
        1 - within / requests,
        sum(each.lost for each in figures),
    )

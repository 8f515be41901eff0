"""Fixtures: a node for tests that only add functions to it, nodes that tests use one after another, and new nodes."""

import gc
import logging
from contextlib import ExitStack
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, settings

from overwinter.node.faults import Faults
from overwinter.node.processes import Processes
from tests.system.nodes import NodeProcess

# A slow machine is not an error in the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# Other parts of the tests run at the same time.
torch.set_num_threads(1)
# PyTorch writes down every step of an export for the handlers of this logger. Pytest adds handlers to each logger that
# does not pass its records on, so that this one would have some.
logging.getLogger("torch.__trace").propagate = True
IDLE_MAX = 4
"""The most nodes that wait for a test."""


def pytest_collection_finish():
    """Keep the garbage collector from traversing all imported modules, and let it run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20)


def pytest_sessionfinish(session, exitstatus):
    """Let a run of only the slow tests succeed if its part of the tests contains none."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr == "slow":
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def mistakes(monkeypatch):
    """Fail a test in whose process a node survived an error of its own code. A test that causes one clears the list."""
    found = []
    contained = Faults._mistaken

    def noted(faults, what, error):
        found.append(error)
        contained(faults, what, error)

    monkeypatch.setattr(Faults, "_mistaken", noted)
    yield found
    assert found == []


@pytest.fixture
def no_zygotes(monkeypatch):
    """Let nodes in this process start no zygote, which would import PyTorch; for tests in which no function runs."""
    monkeypatch.setattr(Processes, "start", lambda processes: None)


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    started = NodeProcess(tmp_path_factory.mktemp("node"))
    yield started
    started.clean()


@pytest.fixture
def make_node(tmp_path):
    with ExitStack() as made:
        numbers = count()

        def make(*options: str, data=None) -> NodeProcess:
            node = NodeProcess(data or tmp_path / f"node{next(numbers)}", *options)
            made.callback(node.clean)
            return node

        yield make


@pytest.fixture(scope="session")
def idle_nodes():
    """The nodes that no test uses now, by their options; the least recently used first."""
    nodes: dict[tuple[str, ...], NodeProcess] = {}
    yield nodes
    for node in nodes.values():
        node.clean()


@pytest.fixture
def shared_node(idle_nodes, tmp_path_factory):
    """Yield a function that returns a node with these options and without functions, which tests use one after another.
    A test may stop it, or kill it and start it again. A function name used before does not begin with version 1.
    """
    used: dict[tuple[str, ...], NodeProcess] = {}

    def share(*options: str) -> NodeProcess:
        if options not in idle_nodes:
            while len(idle_nodes) >= IDLE_MAX:
                idle_nodes.pop(next(iter(idle_nodes))).clean()
            idle_nodes[options] = NodeProcess(tmp_path_factory.mktemp("shared"), *options)
        used[options] = idle_nodes.pop(options)
        return used[options]

    yield share
    for options, node in used.items():
        try:
            if node.process.poll() is None:
                node.empty()
                idle_nodes[options] = node
        finally:
            if options not in idle_nodes:
                node.clean()

"""Fixtures: a shared node for tests that change no state, and a factory of nodes for the others."""

import gc
from contextlib import ExitStack
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.system.nodes import NodeProcess

# A slow machine is not an error in the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# Other parts of the tests run at the same time.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Keep the garbage collector from going through all imported modules again and again."""
    gc.collect()
    gc.freeze()


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

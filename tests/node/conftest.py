"""Fixtures: real processes and a whole node, which tests use one after another."""

import gc
from contextlib import closing

import pytest

from overwinter.node import forks
from overwinter.node.forks import LINGER_S

from .hosted import HostedNode
from .rig import Rig


@pytest.fixture(scope="module", autouse=True)
def collected():
    """Collect garbage after each module, so that sockets and files that it left open are found there, not later."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let a zygote report the end of a process, with the cause, before the node reports it without the cause, even if
    the zygote is halted for a while.
    """
    monkeypatch.setattr(forks, "LINGER_S", 10.0)


@pytest.fixture
def impatient(patient, monkeypatch):
    """Let the node wait for the usual time only; for tests of ends that no zygote reports."""
    monkeypatch.setattr(forks, "LINGER_S", LINGER_S)


@pytest.fixture(scope="session")
def one_rig():
    with closing(Rig()) as made:
        yield made


@pytest.fixture
def rig(one_rig):
    """Yield the processes, and remove everything that a test leaves in them."""
    yield one_rig
    one_rig.run(one_rig.clear())


@pytest.fixture(scope="session")
def one_ungrouped():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overwinter.node.cgroups.group_of", lambda controller: None)
        made = Rig()
    with closing(made):
        yield made


@pytest.fixture
def ungrouped(one_ungrouped):
    """Yield processes without control groups of the system, and remove everything that a test leaves in them."""
    yield one_ungrouped
    one_ungrouped.run(one_ungrouped.clear())


@pytest.fixture(scope="session")
def hosted(tmp_path_factory):
    """A whole node in this process."""
    with closing(HostedNode(tmp_path_factory.mktemp("hosted"))) as made:
        yield made

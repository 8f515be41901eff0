"""Fixtures: real processes for all tests of a file."""

from contextlib import closing

import pytest

from .rig import Rig


@pytest.fixture(scope="module")
def one_rig():
    with closing(Rig()) as made:
        yield made


@pytest.fixture
def rig(one_rig):
    """Yield the processes, and remove everything that a test leaves in them."""
    yield one_rig
    one_rig.run(one_rig.clear())

from contextlib import closing

import pytest

from .rig import Rig


@pytest.fixture(scope="module")
def rig():
    """Real processes, for all tests of a file."""
    with closing(Rig()) as made:
        yield made

import pytest

from .rig import Rig


@pytest.fixture(scope="module")
def rig():
    """Real processes, for all tests of a file."""
    made = Rig()
    yield made
    made.close()

"""One served node for each test file."""

from collections.abc import Iterator

import httpx
import pytest

from tests.api.door import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A node that answers on a port of this machine."""
    with serving(tmp_path_factory.mktemp("repository")) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A plain HTTP client to it."""
    with httpx.Client(base_url=served.url, timeout=20, trust_env=False) as client:
        yield client

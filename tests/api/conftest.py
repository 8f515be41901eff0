"""Fixtures: one served node for each test file."""

from collections.abc import Iterator

import httpx
import pytest

from tests.api.fake_node import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a node that listens on a port of this machine."""
    with serving(tmp_path_factory.mktemp("repository")) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """Yield a plain HTTP client of the node."""
    with httpx.Client(base_url=served.url, timeout=20, trust_env=False, verify=False) as client:
        yield client

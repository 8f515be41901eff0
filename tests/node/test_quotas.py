"""How much may be deployed is bounded, and what one tenant has leaves room for another."""

from types import SimpleNamespace

import pytest

from overwinter.core.config import NodeConfig
from overwinter.core.errors import NoSpaceError, OverloadedError
from overwinter.node.quotas import Quotas


def _of(tenant: str) -> SimpleNamespace:
    return SimpleNamespace(manifest=SimpleNamespace(tenant=tenant))


def quotas(deployed: str, **bounds) -> Quotas:
    """Over one function for each letter, which is its tenant."""
    functions = {
        f"{number}@1": SimpleNamespace(manifest=SimpleNamespace(tenant=tenant))
        for number, tenant in enumerate(deployed)
    }
    return Quotas(NodeConfig(data="nowhere", **bounds), functions)


def test_a_tenant_that_has_all_it_may_have_is_told_and_others_are_not():
    made = quotas("aab", tenant_functions_max=2)
    with pytest.raises(NoSpaceError, match=r"tenant 'a' has 2 .* may have 2"), made.deploying("a"):
        pass
    with made.deploying("b"):
        pass


def test_a_node_that_has_all_it_may_have_says_so_to_everybody():
    with pytest.raises(NoSpaceError, match="this node has 3"), quotas("aab", functions_max=3).deploying("c"):
        pass


def test_deploys_of_one_tenant_at_once_are_bounded_also_when_they_fail():
    made = quotas("", tenant_deploys_max=2)
    with made.deploying("a"):
        with pytest.raises(ValueError, match="failed"), made.deploying("a"):
            raise ValueError("failed")
        with made.deploying("a"):
            with pytest.raises(OverloadedError, match="tenant 'a' has 2 deploys under way"), made.deploying("a"):
                pass
            with made.deploying("b"):
                pass
    with made.deploying("a"):
        pass


def test_pipelines_are_bounded_and_one_may_be_replaced():
    made = quotas("", pipelines_max=1)
    made.check_pipelines([], "p")
    made.check_pipelines(["p"], "p")
    with pytest.raises(NoSpaceError, match="1 pipelines"):
        made.check_pipelines(["p"], "q")

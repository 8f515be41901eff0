"""The amount of deployed functions is bounded, and one tenant's functions leave room for others."""

from types import SimpleNamespace

import pytest

from overwinter.core.config import NodeConfig
from overwinter.core.errors import NoSpaceError, OverloadedError
from overwinter.node.quotas import Quotas


def quotas(deployed: str, **bounds) -> Quotas:
    """Return quotas over one function per letter, which is its tenant, with half a MiB of manifest each."""
    functions = {
        f"{number}@1": SimpleNamespace(manifest=SimpleNamespace(tenant=tenant), manifest_bytes=512 << 10)
        for number, tenant in enumerate(deployed)
    }
    return Quotas(NodeConfig(data="nowhere", **bounds), functions.values)


def check_totals(error: NoSpaceError, *counts: str) -> None:
    """Check that these counts are only in the totals of an error, which only the administrator sees."""
    assert all(count in error.totals and count not in str(error) for count in counts)


def deploy_pipeline(made: Quotas, known: dict[str, str], name: str, tenant: str) -> None:
    with made.deploying_pipeline(known, name, tenant):
        pass


def test_a_tenant_at_its_limit_is_refused_and_others_are_not():
    made = quotas("aab", tenant_functions_max=2)
    with pytest.raises(NoSpaceError, match=r"tenant 'a' has 2 .* may have 2"), made.deploying("a", 10):
        pass
    with made.deploying("b", 10):
        pass


def test_a_node_at_its_limit_refuses_every_tenant():
    with pytest.raises(NoSpaceError, match="this node") as result, quotas("aab", functions_max=3).deploying("c", 10):
        pass
    check_totals(result.value, "3")


def test_concurrent_deploys_of_a_tenant_are_limited_and_failed_ones_no_longer_count():
    made = quotas("", tenant_deploys_max=2)
    with made.deploying("a", 10):
        with pytest.raises(ValueError, match="failed"), made.deploying("a", 10):
            raise ValueError("failed")
        with made.deploying("a", 10):
            with pytest.raises(OverloadedError, match="tenant 'a' has 2 deploys in progress"), made.deploying("a", 10):
                pass
            with made.deploying("b", 10):
                pass
    with made.deploying("a", 10):
        pass


def test_manifests_are_bounded_by_their_bytes_and_a_tenant_has_half():
    made = quotas("aabbc", manifests_bytes_max=3 << 20)
    with made.deploying("a", 512 << 10):
        pass
    with pytest.raises(NoSpaceError, match="tenant 'a'"), made.deploying("a", (512 << 10) + 1):
        pass
    with pytest.raises(NoSpaceError, match="this node") as result, made.deploying("c", (512 << 10) + 1):
        pass
    check_totals(result.value, f"{(3 << 20) + 1}", f"{3 << 20}")


def test_pipelines_are_limited_a_tenant_has_half_and_one_may_be_replaced():
    made = quotas("", pipelines_max=4)
    deploy_pipeline(made, {}, "p", "a")
    deploy_pipeline(made, {"p": "a", "q": "a"}, "q", "a")
    with pytest.raises(NoSpaceError, match="tenant 'a' has 2 .* may have 2"):
        deploy_pipeline(made, {"p": "a", "q": "a"}, "r", "a")
    deploy_pipeline(made, {"p": "a", "q": "a"}, "r", "b")
    with pytest.raises(NoSpaceError, match="this node") as result:
        deploy_pipeline(made, {"p": "a", "q": "a", "r": "b", "s": "b"}, "t", "c")
    check_totals(result.value, "4")


def test_concurrent_deploys_count_until_they_are_registered():
    made = quotas("aa", functions_max=4, tenant_functions_max=3)
    with made.deploying("a", 10):
        with pytest.raises(NoSpaceError, match="tenant 'a' has 3"), made.deploying("a", 10):
            pass
        with made.deploying("b", 10), pytest.raises(NoSpaceError, match="this node"), made.deploying("c", 10):
            pass
        with made.deploying("c", 10) as counted:
            counted(SimpleNamespace())
            # `quotas` adds no function for it, so its place is free again.
            with made.deploying("b", 10):
                pass
    with made.deploying("a", 10):
        pass


def test_concurrent_manifests_are_limited_by_their_bytes():
    made = quotas("", manifests_bytes_max=4 << 20)
    with made.deploying("a", 2 << 20), pytest.raises(NoSpaceError, match="tenant 'a'"), made.deploying("a", 1):
        pass


def test_concurrent_pipelines_are_limited():
    made = quotas("", pipelines_max=4)
    with made.deploying_pipeline({"p": "a"}, "q", "a"):
        with pytest.raises(NoSpaceError, match="tenant 'a' has 2"):
            deploy_pipeline(made, {"p": "a"}, "r", "a")
        with pytest.raises(NoSpaceError, match="this node"):
            deploy_pipeline(made, {"p": "a", "r": "b", "s": "b"}, "t", "c")
        # A pipeline in progress counts once, also if it is known already or deployed twice at the same time.
        deploy_pipeline(made, {"p": "a", "q": "a", "r": "b"}, "t", "c")
        deploy_pipeline(made, {"p": "a"}, "q", "a")
    deploy_pipeline(made, {"p": "a"}, "r", "a")

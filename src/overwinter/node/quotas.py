"""How much may be deployed on a node, by all and by one tenant, and by how many deploys at once?"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from overwinter.core.config import NodeConfig
from overwinter.core.errors import NoSpaceError, OverloadedError
from overwinter.core.ids import FunctionId, FunctionName, TenantId
from overwinter.node.functions import DeployedFunction

WAIT_S = 1.0
"""What a deploy is asked to wait that comes while its tenant has too many under way."""


class Quotas:
    """Counts what is deployed against the node's configuration."""

    def __init__(self, config: NodeConfig, functions: Mapping[FunctionId, DeployedFunction]) -> None:
        self._config = config
        self._functions = functions
        self._deploys: Counter[TenantId] = Counter()

    @contextmanager
    def deploying(self, tenant: TenantId, manifest_bytes: int) -> Iterator[None]:
        """A deploy is under way; OverloadedError or NoSpaceError when there are too many, or too much is deployed."""
        most = self._config.tenant_deploys_max
        if self._deploys[tenant] >= most:
            raise OverloadedError(f"tenant {tenant!r} has {most} deploys under way: wait for one to end", WAIT_S)
        others = [function for function in self._functions.values() if function.manifest.tenant != tenant]
        own = [function for function in self._functions.values() if function.manifest.tenant == tenant]
        self._check(len(others) + len(own), self._config.functions_max, "this node")
        self._check(len(own), self._config.tenant_functions_max, f"tenant {tenant!r}")
        room = self._config.manifests_bytes_max
        taken = manifest_bytes + sum(function.manifest_bytes for function in own)
        _check_bytes(taken, room // 2, f"tenant {tenant!r}")
        _check_bytes(taken + sum(function.manifest_bytes for function in others), room, "this node")
        self._deploys[tenant] += 1
        try:
            yield
        finally:
            self._deploys[tenant] -= 1
            self._deploys += Counter()

    def check_pipelines(self, known: Mapping[FunctionName, TenantId], name: FunctionName, tenant: TenantId) -> None:
        """NoSpaceError unless one more pipeline, or another of a known name, may be deployed."""
        if name in known:
            return
        most = self._config.pipelines_max
        if len(known) >= most:
            raise NoSpaceError(f"this node keeps {most} pipelines and no more: remove one that nobody calls")
        if 2 * list(known.values()).count(tenant) >= most > 1:
            raise NoSpaceError(f"tenant {tenant!r} has half of the {most} pipelines of this node: remove one first")

    def _check(self, count: int, most: int, whose: str) -> None:
        if count >= most:
            raise NoSpaceError(f"{whose} has {count} versions of functions, and may have {most}: remove some first")


def _check_bytes(taken: int, most: int, whose: str) -> None:
    if taken > most:
        raise NoSpaceError(f"the manifests of {whose} would have {taken} bytes, and may have {most}: remove some first")

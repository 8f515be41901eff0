"""Bounds what may be deployed on a node, in total and for one tenant, and the number of concurrent deploys."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from overwinter.core.config import NodeConfig
from overwinter.core.errors import NoSpaceError, OverloadedError
from overwinter.core.ids import FunctionName, TenantId
from overwinter.node.functions import DeployedFunction

WAIT_S = 1.0
"""The Retry-After of a deploy that exceeds the limit on its tenant's concurrent deploys."""


class _Entry(NamedTuple):
    """What one version counts for in the totals."""

    tenant: TenantId
    manifest_bytes: int


class Quotas:
    """Counts deployed versions and deploys in progress against the node's limits."""

    def __init__(self, config: NodeConfig, deployed: Callable[[], Iterable[DeployedFunction]]) -> None:
        self._config = config
        self._deployed = deployed
        self._deploys: Counter[TenantId] = Counter()
        self._reserved: list[_Entry] = []
        """What deploys in progress will add."""
        self.functions_on_trial: list[DeployedFunction] = []
        """The functions of deploys in progress that are in the node's registry already."""
        self._pipelines: list[tuple[FunctionName, TenantId]] = []
        """The pipelines whose deploys are in progress."""

    @contextmanager
    def deploying(
        self, tenant: TenantId, manifest_bytes: int, functions_max: int | None = None
    ) -> Iterator[Callable[[DeployedFunction], None]]:
        """Count a deploy until the context ends. Raises OverloadedError or NoSpaceError if there are too many deploys,
        or too much is deployed; one tenant may have half of the bytes of manifests. `functions_max` is the tenant's
        limit, if it is lower than that of the node.

        The deploy passes its function to the yielded callback as soon as the function is in the node's registry; until
        then the count is reserved.
        """
        most = self._config.tenant_deploys_max
        if self._deploys[tenant] >= most:
            raise OverloadedError(f"tenant {tenant!r} has {most} deploys in progress: wait for one to end", WAIT_S)
        deployed = [_Entry(each.manifest.tenant, each.manifest_bytes) for each in self._deployed()]
        entries = [*deployed, *self._reserved]
        others = [entry for entry in entries if entry.tenant != tenant]
        own = [entry for entry in entries if entry.tenant == tenant]
        tenant_max, total, bytes_max = self._config.tenant_functions_max, len(entries), self._config.manifests_bytes_max
        own_max = tenant_max if functions_max is None else min(tenant_max, functions_max)
        if total >= self._config.functions_max:
            totals = f"{total} versions of functions, and at most {self._config.functions_max}"
            raise NoSpaceError("this node has no room for more versions of functions: remove some", totals=totals)
        if len(own) >= own_max:
            counts = f"{len(own)} versions of functions, and may have {own_max}"
            raise NoSpaceError(f"tenant {tenant!r} has {counts}: remove some first")
        taken = manifest_bytes + sum(entry.manifest_bytes for entry in own)
        if taken > bytes_max // 2:
            counts = f"{taken} bytes, and may have {bytes_max // 2}"
            raise NoSpaceError(f"the manifests of tenant {tenant!r} would have {counts}: remove some first")
        if (together := taken + sum(entry.manifest_bytes for entry in others)) > bytes_max:
            totals = f"{together} bytes of manifests, and at most {bytes_max}"
            raise NoSpaceError("this node has no room for more manifests: remove functions", totals=totals)
        self._deploys[tenant] += 1
        reserved = [_Entry(tenant, manifest_bytes)]
        tried: list[DeployedFunction] = []
        self._reserved += reserved

        def counted(function: DeployedFunction) -> None:
            self._reserved.remove(reserved.pop())
            tried.append(function)
            self.functions_on_trial.append(function)

        try:
            yield counted
        finally:
            for entry in reserved:
                self._reserved.remove(entry)
            for function in tried:
                self.functions_on_trial.remove(function)
            self._deploys[tenant] -= 1
            # Remove the tenants without deploys.
            self._deploys += Counter()

    @contextmanager
    def deploying_pipeline(
        self, deployed: Mapping[FunctionName, TenantId], name: FunctionName, tenant: TenantId
    ) -> Iterator[None]:
        """Count a pipeline while its deploy is in progress; raise NoSpaceError if a limit is exceeded. A new
        version of an existing pipeline is always allowed. One tenant may have half of the pipelines.
        """
        known = {**dict(self._pipelines), **deployed}
        if name not in known:
            self._check_pipelines(known, tenant)
        self._pipelines.append((name, tenant))
        try:
            yield
        finally:
            self._pipelines.remove((name, tenant))

    def _check_pipelines(self, known: Mapping[FunctionName, TenantId], tenant: TenantId) -> None:
        most = self._config.pipelines_max
        if len(known) >= most:
            totals = f"{len(known)} pipelines, and at most {most}"
            raise NoSpaceError("this node has no room for more pipelines: remove one", totals=totals)
        own, own_max = list(known.values()).count(tenant), -(-most // 2)
        if own >= own_max and most > 1:
            raise NoSpaceError(f"tenant {tenant!r} has {own} pipelines, and may have {own_max}: remove one first")

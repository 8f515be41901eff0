"""One tenant's view of a node's telemetry: only data of its own functions, unless it acts as the administrator.

Data that depends on other tenants is left out: totals of the node, and the exclusive, billed and transferred bytes of a
function as counted over all tenants, which would reveal that another tenant has the same weights.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple, cast

import msgspec

from overwinter.api.node_interface import NodeInterface, Telemetry
from overwinter.core.ids import FunctionName, TenantId
from overwinter.telemetry.activity import NodeActivity
from overwinter.telemetry.devices import DeviceActivity, of_tenant
from overwinter.telemetry.explaining import Explanation
from overwinter.telemetry.metering import Usage

HIDDEN_METRICS = (
    b"overwinter_function_bytes",
    b"overwinter_loaded_bytes",
    b"overwinter_device_moved_bytes",
    b"overwinter_device_peer_bytes",
)
"""The metrics of a function that depend on blocks that other tenants also hold."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_named = re.compile(rb'[{,](?:function|pipeline)="([^"]+)"')


class Names(Protocol):
    """Replaces the node's names by the tenant's."""

    def translated_json(self, value: object) -> msgspec.Raw:
        """Encode as JSON, with the tenant's names."""
        ...

    def translated_bytes(self, text: bytes) -> bytes:
        """Replace the names in a text of the node."""
        ...


class NodeTelemetry(Telemetry, Protocol):
    """The telemetry of a node, which can be asked for one tenant."""

    async def metrics(self, tenant: TenantId | None = None, /) -> bytes:
        """All metrics, in Prometheus's text format; with `tenant`, of functions and pipelines only its own."""
        ...

    async def usage(self, tenant: TenantId | None, /) -> Sequence[Usage]:
        """The usage of each function, of all tenants or of one."""
        ...

    async def activity(self, tenant: TenantId | None = None, /) -> NodeActivity:
        """The current activity; with `tenant`, of functions only its own."""
        ...

    async def shared(self, key: Hashable, make: Callable[[], Awaitable[T]], /) -> T:
        """Return what `make` returns. Callers with the same key that ask while a computation runs wait for it to end,
        and share one further computation.
        """
        ...

    async def in_thread(self, work: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Run slow work in a thread, one piece at a time."""
        ...


class TenantTelemetry:
    """The visible data of a tenant's functions; for an administrator, metrics, usage, activity and devices of the whole
    node.
    """

    def __init__(
        self,
        node: NodeInterface,
        tenant: TenantId,
        names: Names,
        node_name: Callable[[FunctionName], FunctionName],
        is_admin: bool,
    ) -> None:
        """Create it. `node_name` returns the node's name of a function of the tenant, or raises NotFoundError."""
        self._node = node
        self._telemetry = cast(NodeTelemetry, node.telemetry)
        self._tenant = tenant
        self._names = names
        self._node_name = node_name
        self._is_admin = is_admin

    async def metrics(self) -> bytes:
        """The metrics of the tenant's functions and pipelines, in Prometheus's text format."""
        if self._is_admin:
            return await self._telemetry.metrics()
        return await self._telemetry.shared(("own metrics", self._tenant), self._own_metrics)

    async def _own_metrics(self) -> bytes:
        text = await self._telemetry.metrics(self._tenant)
        own = {view.name.encode() for view in self._node.pipelines(self._tenant)}
        own.update(each.name.encode() for each in (await self._telemetry.activity(self._tenant)).functions)
        return await self._telemetry.in_thread(self._translated_metrics, text, own)

    def _translated_metrics(self, text: bytes, own: Container[bytes]) -> bytes:
        """The samples of these functions under the tenant's names. Each line is translated separately: one replacement
        in a text of megabytes would block the loop, also from a thread, because it holds the GIL.
        """
        lines = own_metrics(text, own).splitlines(keepends=True)
        return b"".join(map(self._names.translated_bytes, lines))

    async def usage(self, tenant: TenantId | None) -> Sequence[object]:
        """Return the usage of each function of the tenant; empty for any other tenant, whether it exists or not."""
        if self._is_admin:
            return await self._telemetry.usage(tenant)
        if tenant not in (None, self._tenant):
            return []
        return await self._telemetry.shared(("own usage", self._tenant), self._own_usage)

    async def _own_usage(self) -> list[msgspec.Raw]:
        used = await self._telemetry.usage(self._tenant)
        return await self._telemetry.in_thread(self._translated_each, map(visible_usage, used))

    async def activity(self) -> object:
        """The current activity of the tenant's functions."""
        if self._is_admin:
            return await self._telemetry.activity()
        return await self._telemetry.shared(("own activity", self._tenant), self._own_activity)

    async def _own_activity(self) -> NodeActivity:
        found = await self._telemetry.activity(self._tenant)
        return await self._telemetry.in_thread(self._translated_activity, found)

    async def devices(self) -> object:
        """The devices that serve the tenant, with its own functions there."""
        if self._is_admin:
            return await self._telemetry.devices()
        return await self._telemetry.shared(("own devices", self._tenant), self._own_devices)

    async def _own_devices(self) -> msgspec.Raw:
        found = cast(list[DeviceActivity], await self._telemetry.devices())
        return await self._telemetry.in_thread(self._names.translated_json, of_tenant(found, self._tenant))

    async def explain(self, name: FunctionName, version: int | None) -> object:
        """The explanation of a function of the tenant; raises NotFoundError if there is none."""
        explained = cast(Explanation, await self._telemetry.explain(self._node_name(name), version))
        if explained.pool is not None and not self._is_admin:
            pool = msgspec.structs.replace(explained.pool, moved_bytes=None)
            explained = msgspec.structs.replace(explained, pool=pool)
        return await self._telemetry.in_thread(self._names.translated_json, explained)

    async def logs(self, name: FunctionName, version: int | None) -> object:
        """The last output of the code of a function of the tenant; raises NotFoundError for an unknown one."""
        found = await self._telemetry.logs(self._node_name(name), version)
        return await self._telemetry.in_thread(self._names.translated_json, found)

    def _translated_activity(self, found: NodeActivity) -> NodeActivity:
        own = own_activity(found, self._tenant)
        return msgspec.structs.replace(
            own,
            functions=self._translated_each(own.functions),
            workers=self._translated_each(own.workers),
            devices=self._translated_each(own.devices),
        )

    def _translated_each(self, things: Iterable[object]) -> list[msgspec.Raw]:
        """Convert each to JSON separately, for the same reason as in `_translated_metrics`."""
        return [self._names.translated_json(thing) for thing in things]


def own_activity(activity: NodeActivity, tenant: TenantId) -> NodeActivity:
    """The part of a node's activity that concerns one tenant's functions; slow for a thousand functions."""
    own = [each for each in activity.functions if each.tenant == tenant]
    ids = {worker for each in own for worker in each.workers}
    workers = [each for each in activity.workers if each.worker in ids]
    return msgspec.structs.replace(
        activity,
        cores_running=None,
        worker_states=dict(Counter[str](each.state for each in workers)),
        running=sum(each.running for each in own),
        queued=sum(each.queued for each in own),
        host_bytes=sum(each.host_bytes for each in own),
        host_budget=None,
        private_bytes=sum(each.private_bytes for each in own),
        private_budget=None,
        functions=[msgspec.structs.replace(each, exclusive_bytes=None) for each in own],
        workers=workers,
        devices=of_tenant(activity.devices, tenant),
    )


def visible_usage(used: Usage) -> Usage:
    """The usage of a function without the figures that depend on how many tenants share a block."""
    device = used.device and msgspec.structs.replace(used.device, moved_bytes=None, device_byte_s=None)
    return msgspec.structs.replace(used, disk_byte_s=None, host_byte_s=None, device=device)


def own_metrics(text: bytes, names: Container[bytes]) -> bytes:
    """The samples of these functions and pipelines except HIDDEN_METRICS, with their HELP and TYPE lines."""
    kept: list[bytes] = []
    header: list[bytes] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(b"# HELP "):
            header = [line]
        elif line.startswith(b"#"):
            header.append(line)
        elif (found := _named.search(line)) and found[1] in names and not line.startswith(HIDDEN_METRICS):
            kept += header
            header = []
            kept.append(line)
    return b"".join(kept)

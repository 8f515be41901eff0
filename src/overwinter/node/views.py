"""The node's descriptions of a function."""

import msgspec

from overwinter.core.agreement import Agreement
from overwinter.core.function import Availability, Settings
from overwinter.core.ids import Address, DeviceId, FunctionName, TenantId, WorkerId
from overwinter.core.tensor import TensorSpec
from overwinter.node import clock
from overwinter.node.functions import DeployedFunction
from overwinter.scheduler.published import Published
from overwinter.scheduler.snapshot import FamilySnapshot, FunctionSnapshot
from overwinter.store.hosts import HostStores
from overwinter.store.residency import missing_bytes
from overwinter.telemetry.explaining import FunctionFacts


class TenantBlocks:
    """The blocks of a function in its host store, as far as its tenant may know: those that a function of the tenant
    has there or is loading. They are determined when this object is created, on the event loop's thread.
    """

    def __init__(self, function: DeployedFunction, published: Published, hosts: HostStores) -> None:
        """Create it for the blocks of `function`."""
        self._host = hosts.store(function.store)
        addresses = (blob.address for blob in function.manifest.blobs())
        self._own = published.held(function.manifest.tenant, function.store, addresses)

    def holds(self, address: Address) -> bool:
        """Whether the store has the block, and the tenant may know."""
        return address in self._own and self._host.holds(address)


class DeployedVersion(msgspec.Struct, frozen=True):
    """The result of a deploy."""

    name: FunctionName
    version: int
    warning: str
    """What the author should know; empty if there is nothing."""


class FunctionInfo(FunctionFacts, frozen=True, kw_only=True):
    """The description of a function for people and programs."""

    state: Availability
    reason: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    agreement: Agreement | None
    handler: bool
    lifecycle: str
    workers: tuple[WorkerId, ...]
    """The workers that have bound it; functions of a family share them."""
    devices: tuple[DeviceId, ...]
    """The devices with its blocks, if it may run on the pool."""
    members: int
    """The number of functions in its family."""
    waiting: int
    """The queued requests."""
    blocks: int
    nbytes: int
    """The bytes of all its blobs."""
    missing_bytes: int
    """The bytes of its blobs that no function of its tenant has in its host store."""
    created: float
    """The time of the deploy, in seconds since 1970."""
    sharing: FamilySnapshot | None = None
    """Its whole family; only in the description of a single function."""


class DeployedView:
    """The current state of one deployed version of a function. Cheap to create: one is created per request."""

    platform = "overwinter_program"

    def __init__(self, function: DeployedFunction, published: Published, hosts: HostStores) -> None:
        self._function = function
        self._published = published
        self._hosts = hosts
        self.name: FunctionName = function.deployment.name
        self.version: int = function.deployment.version
        self.tenant: TenantId = function.manifest.tenant
        self.inputs: tuple[TensorSpec, ...] = function.manifest.inputs
        self.outputs: tuple[TensorSpec, ...] = function.manifest.outputs
        self.settings: Settings = function.manifest.settings

    def _known(self) -> FunctionSnapshot | None:
        return self._published.function(self._function.id, clock.now())

    @property
    def lifecycle(self) -> str:
        """Its state in the scheduler: asleep, waking, awake, backoff or unloaded."""
        known = self._known()
        return "unloaded" if known is None else known.state

    @property
    def state(self) -> Availability:
        """READY: a request would be answered, even if the function is asleep."""
        return _availability(self._function, self._known())

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        return _reason(self._function, self._known())

    def info(self, whole: bool = False, /) -> FunctionInfo:
        """Its full description; `whole`: with its family, which may be large."""
        deployment, known = self._function.deployment, self._known()
        versions = self._published.versions(self.name)
        blocks = TenantBlocks(self._function, self._published, self._hosts)
        return FunctionInfo(
            name=self.name,
            version=self.version,
            tenant=self.tenant,
            traffic=versions.percent(self.version),
            promoted=bool(versions.shares),
            state=_availability(self._function, known),
            reason=_reason(self._function, known),
            platform=self.platform,
            inputs=self.inputs,
            outputs=self.outputs,
            settings=self.settings,
            agreement=deployment.manifest.agreement,
            handler=deployment.manifest.handler is not None,
            lifecycle="unloaded" if known is None else known.state,
            workers=() if known is None else known.workers,
            devices=() if known is None else known.devices,
            family=self._function.id if known is None else known.family,
            members=1 if known is None else known.members,
            waiting=0 if known is None else known.queued,
            blocks=len(deployment.manifest.blocks),
            nbytes=self._function.nbytes,
            missing_bytes=missing_bytes(deployment.manifest.blobs(), blocks),
            created=deployment.created,
            sharing=self._published.family(self._function.id) if whole else None,
        )


def _availability(function: DeployedFunction, known: FunctionSnapshot | None) -> Availability:
    # While its parts on the pool are tried, the scheduler does not know the function yet.
    if function.on_trial if known is None else known.on_trial:
        return "LOADING"
    return "UNAVAILABLE" if known is None or known.state == "unloaded" or known.fault else "READY"


def _reason(function: DeployedFunction, known: FunctionSnapshot | None) -> str:
    fault = "" if known is None else known.fault
    return {"READY": "", "LOADING": "on trial", "UNAVAILABLE": fault or "unloaded"}[_availability(function, known)]

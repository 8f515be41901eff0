"""The node's descriptions of a function and of an answer."""

from typing import Literal

import msgspec

from overwinter.core.actions import Start
from overwinter.core.agreement import Agreement
from overwinter.core.function import Settings
from overwinter.core.ids import Address, FunctionName, TenantId, WorkerId
from overwinter.core.tensor import Tensor, TensorSpec
from overwinter.core.versions import Versions
from overwinter.node import clock
from overwinter.node.functions import DeployedFunction
from overwinter.scheduler.lifecycles import function_state
from overwinter.scheduler.snapshot import family_name
from overwinter.scheduler.state import Function, State
from overwinter.store.residency import Place, missing_bytes
from overwinter.telemetry.explaining import FunctionFacts
from overwinter.telemetry.families import FamilyFacts, family_facts

Availability = Literal["READY", "UNAVAILABLE", "LOADING"]


class TenantBlocks:
    """What a tenant may know of a host store: the blocks that its own functions keep there."""

    def __init__(self, host: Place, state: State, tenant: TenantId) -> None:
        self._host = host
        self._state = state
        self._tenant = tenant
        self._own: set[Address] | None = None

    def holds(self, address: Address) -> bool:
        """Whether the block is here for the tenant."""
        # Only now: most views are made to run a request.
        return address in self.own() and self._host.holds(address)

    def own(self) -> set[Address]:
        """The blocks of its functions that are here or being loaded. The first call must be on the loop, whose tables
        it reads.
        """
        if self._own is None:
            tenant = self._state.tenants.get(self._tenant)
            own = () if tenant is None else (self._state.functions[id_] for id_ in tenant.functions)
            self._own = set().union(*(each.sizes for each in own if each.loaded or each.loading is not None))
        return self._own


class Reply(msgspec.Struct, frozen=True):
    """A function's answer to one request."""

    name: FunctionName
    version: int
    outputs: list[Tensor]
    start: Start


class DeployedVersion(msgspec.Struct, frozen=True):
    """The result of a deploy."""

    name: FunctionName
    version: int
    warning: str
    """What its author should know; empty: nothing."""


class FunctionInfo(FunctionFacts, frozen=True, kw_only=True):
    """A function for people and programs that ask about it."""

    state: Availability
    reason: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    agreement: Agreement | None
    handler: bool
    life: str
    workers: tuple[WorkerId, ...]
    """Which ones: functions of a family share them."""
    members: int
    """How many its family has."""
    waiting: int
    """Its requests in the queue."""
    blocks: int
    nbytes: int
    """Bytes of all its blobs."""
    missing_bytes: int
    """Of these, what the host store lacks."""
    created: float
    """Seconds since 1970."""
    sharing: FamilyFacts | None = None
    """Its family as a whole; only told of one function at a time."""


class FunctionView:
    """One deployed version of a function, as it is at the moment of asking. Cheap to make: one is made a request."""

    platform = "overwinter_program"

    def __init__(self, function: DeployedFunction, state: Function | None, versions: Versions, host: Place) -> None:
        self._function = function
        self._state = state
        self._host = host
        self._versions = versions
        self.name: FunctionName = function.deployment.name
        self.version: int = function.deployment.version
        self.tenant: TenantId = function.manifest.tenant
        self.inputs: tuple[TensorSpec, ...] = function.manifest.inputs
        self.outputs: tuple[TensorSpec, ...] = function.manifest.outputs
        self.settings: Settings = function.manifest.settings

    @property
    def life(self) -> str:
        """Its state in the scheduler: asleep, waking, awake, backoff or unloaded."""
        return "unloaded" if self._state is None else function_state(self._state, clock.now())

    @property
    def state(self) -> Availability:
        """READY: a request would be answered, even if the function sleeps now."""
        if self._state is not None and self._state.on_trial:
            return "LOADING"
        return "UNAVAILABLE" if self.life == "unloaded" else "READY"

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        fault = "" if self._state is None else self._state.fault
        return {"READY": "", "LOADING": "on trial", "UNAVAILABLE": fault or "unloaded"}[self.state]

    def info(self, whole: bool = False, /) -> FunctionInfo:
        """Its full description; `whole`: with its family, which may be large."""
        deployment, state = self._function.deployment, self._state
        return FunctionInfo(
            name=self.name,
            version=self.version,
            tenant=self.tenant,
            traffic=self._versions.percent(self.version),
            promoted=bool(self._versions.shares),
            state=self.state,
            reason=self.reason,
            platform=self.platform,
            inputs=self.inputs,
            outputs=self.outputs,
            settings=self.settings,
            agreement=deployment.manifest.agreement,
            handler=deployment.manifest.handler is not None,
            life=self.life,
            workers=() if state is None else tuple(state.workers),
            family=self._function.id if state is None else family_name(state.family),
            members=1 if state is None else len(state.family.members),
            waiting=0 if state is None else len(state.queue),
            blocks=len(deployment.manifest.blocks),
            nbytes=self._function.nbytes,
            missing_bytes=missing_bytes(self._function.blobs, self._host),
            created=deployment.created,
            sharing=family_facts(state) if whole and state is not None else None,
        )

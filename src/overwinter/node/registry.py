"""The deployed functions of a node, and the data that its zygotes need of them."""

from collections.abc import Callable, Iterator

from overwinter.core.errors import OverwinterError, StoreError, no_function
from overwinter.core.events import Event, WorkerReady, ZygoteLost
from overwinter.core.ids import FamilyId, FunctionId, FunctionName, TenantId, function_id, is_part
from overwinter.node.family_blocks import FamilyBlocks, mapped_bytes
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.log_throttle import LogThrottle
from overwinter.node.views import DeployedView
from overwinter.node.workers import WorkerProcess
from overwinter.node.zygote_process import ForkLimits
from overwinter.scheduler.published import Published
from overwinter.store.blocks import without_addresses
from overwinter.store.hosts import HostStores
from overwinter.worker.messages import Bind, Load


class Registry:
    """All versions of all functions by id, including those on trial, and the parts of them that run on the pool as
    functions of their own: programs and slices.
    """

    def __init__(self, hosts: HostStores, published: Published, post: Callable[[Event], None], log: Log) -> None:
        self._hosts = hosts
        self._published = published
        self._post = post
        self._log = log
        self._throttle = LogThrottle(log)
        self.functions: dict[FunctionId, DeployedFunction] = {}
        """Read by others; only `add` and `remove` change it."""
        self._families: dict[FamilyId, FamilyBlocks] = {}

    def add(self, *parts: DeployedFunction) -> None:
        """Add parts of versions."""
        for part in parts:
            self.remove(part.id)
            self.functions[part.id] = part
            family = self._families.get(part.family_id)
            if family is None:
                family = self._families[part.family_id] = FamilyBlocks(part.manifest.tenant, part.memory_bytes)
            family.add(part)

    def remove(self, id_: FunctionId) -> DeployedFunction | None:
        """Remove one part of a version, and return it if it is here."""
        part = self.functions.pop(id_, None)
        if part is not None:
            family = self._families[part.family_id]
            family.remove(part)
            if not family.member_count:
                del self._families[part.family_id]
        return part

    # For callers

    def deployed(self, name: FunctionName, version: int | None) -> DeployedFunction:
        """Return one version, or the default version; raise NotFoundError."""
        asked = self._published.default(name) if version is None else version
        function = None if asked is None else self.functions.get(function_id(name, asked))
        if function is None or is_part(name):
            raise no_function(name if version is None else function_id(name, version), self.versions(name))
        return function

    def view(self, name: FunctionName, version: int | None) -> DeployedView:
        """Return one version, or the default version, as callers see it; raise NotFoundError."""
        return DeployedView(self.deployed(name, version), self._published, self._hosts)

    def versions(self, name: FunctionName) -> list[int]:
        """Return the versions of a function that passed their trial, ascending."""
        return self._published.versions(name).numbers

    def views(self, tenant: TenantId | None) -> Iterator[DeployedView]:
        """Yield every version of every function, or of those of one tenant, by name and number, each in its state at
        that moment.
        """
        wanted = [each for each in self.deployed_functions() if tenant in (None, each.manifest.tenant)]
        ordered = sorted(wanted, key=lambda f: (f.deployment.name, f.deployment.version))
        for function in ordered:
            # It may have been removed meanwhile.
            if function.id in self.functions:
                yield DeployedView(function, self._published, self._hosts)

    def deployed_functions(self) -> Iterator[DeployedFunction]:
        """Yield every version of every function, without the further parts that it has on the pool."""
        return (each for each in self.functions.values() if not is_part(each.deployment.name))

    def is_resident(self, function: DeployedFunction) -> bool:
        """Whether all blocks of a function are in its host store."""
        host = self._hosts.store(function.store)
        return all(host.holds(blob.address) for blob in function.blobs)

    def error_text(self, function: DeployedFunction, error: Exception) -> str:
        """Return the message of an error for callers, without block addresses; the log gets the full message."""
        whole = error.text_for_administrator() if isinstance(error, OverwinterError) else str(error)
        self._log(f"function {function.id}: {whole}", level="error", function=function.id)
        return f"function {function.id}: {without_addresses(str(error))}"

    def log_totals(self, id_: FunctionId, refused: str) -> None:
        """Log how full the node is, when it refuses for lack of space. The error for the caller does not say that."""
        function = self.functions.get(id_)
        tenant = id_ if function is None else function.manifest.tenant
        self._throttle.log(("space", tenant), lambda: f"a request was refused: {refused} ({self._published.totals()})")

    def mapped_bytes(self, function: DeployedFunction) -> int:
        """Return the address space for mappings in a worker that is forked for a function."""
        family = self._families.get(function.family_id)
        return mapped_bytes([function]) if family is None else family.mapped_bytes

    # For zygotes

    def tenants(self) -> set[TenantId]:
        """Return the tenants that have functions."""
        return {function.manifest.tenant for function in self.functions.values()}

    def fork_limits_of(self, tenant: TenantId) -> ForkLimits:
        """Return the largest limits that a worker of the tenant may need, at least the default ones."""
        families = [each for each in self._families.values() if each.tenant == tenant]
        memory_bytes, mapped = [each.memory_bytes for each in families], [each.mapped_bytes for each in families]
        return ForkLimits(max(ForkLimits().memory_bytes, *memory_bytes), max(ForkLimits().mapped_bytes, *mapped))

    def preparation_of(self, id_: FunctionId) -> tuple[Load, Bind, list[int]] | None:
        """Return the messages to load and bind a function in its tenant's zygote, and the descriptors; None when it is
        not to be prepared, or its blocks cannot be used now.
        """
        function = self.functions.get(id_)
        if function is None or not function.failed_preparations_left:
            return None
        try:
            fds = self._hosts.store(function.store).open(function.files(bare=True))
            return function.load_message(bare=True), function.bind_message(bare=True), fds
        except StoreError:
            # Its blocks were evicted, or are not verified yet. After a restart of the zygote, the next run of this
            # program requests the preparation again.
            return None

    def worker_waits(self, process: WorkerProcess) -> None:
        """A worker that was forked ahead is ready to be used."""
        self._post(WorkerReady(process.worker))

    def zygote_lost(self, tenant: TenantId | None, compiling: FunctionId | None, preparation_timed_out: bool) -> None:
        """Report that a tenant's zygote, or with None every zygote, has lost its compiled programs. `compiling`: the
        function whose program it was compiling; `preparation_timed_out`: whether that took too long.
        """
        failed = None if compiling is None else self.functions.get(compiling)
        if failed is not None:
            left = 0 if preparation_timed_out else max(0, failed.failed_preparations_left - 1)
            for function in self.functions.values():
                if function.program_key == failed.program_key:
                    function.failed_preparations_left = min(function.failed_preparations_left, left)
        self._post(ZygoteLost(tenant))

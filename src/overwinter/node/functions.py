"""The node's record of each deployed function: the data for loading it, and the messages to its workers."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from overwinter.core.errors import TooLargeError
from overwinter.core.function import BlobSize, FunctionSpec, Settings, runs_on_pool
from overwinter.core.ids import (
    SHARED,
    Address,
    FamilyId,
    FunctionId,
    StoreName,
    TenantId,
    function_id,
    is_part,
    program_name,
    slice_name,
)
from overwinter.core.profile import Profile
from overwinter.core.tensor import Tensor, TensorMeta, TensorSpec
from overwinter.model.program import Program
from overwinter.node.device_fit import Slice
from overwinter.node.pressure import total_bytes
from overwinter.node.recent_output import RecentOutput
from overwinter.store.host import page_bytes
from overwinter.store.manifest import Blob, Deployment, encode_manifest, weight_positions
from overwinter.worker.channel import packet_bytes_max
from overwinter.worker.messages import Bind, Load, Trial

ENVELOPE_BYTES = 1024
"""The bytes that a message to a zygote may have in addition to the load and bind messages in it."""
_LARGE = 1 << 32
"""A size that takes as many bytes in a message as any."""
BUFFERS_BYTES = 512 << 20
"""The address space for all buffers of a worker. What they need beyond it is taken from that of private memory."""

FAILED_PREPARATIONS_MAX = 3
"""How many zygotes may end, for any reason, while they compile a program; after that its workers compile it
themselves.
"""


class Family(NamedTuple):
    """The common properties of functions that can share a worker; weights, assets and other settings may differ."""

    tenant: TenantId
    program: Address
    source: Address | None
    """The address of the handler's source."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    store: StoreName
    limits: tuple[int, int, int, int]
    """The most cores, the largest batch, the concurrency and the memory of its workers: answers depend on them."""
    program_runs: Literal["in workers", "on the pool", "on the pool first"]
    calls: tuple[int, int] | None
    """The calls of a slice; None: the whole program."""
    alone: FunctionId | None
    """The only member, if the function shares workers with no other."""

    @property
    def id(self) -> FamilyId:
        """A short text that identifies the family."""
        encoded = repr(self._replace(inputs=(), outputs=())).encode() + msgspec.msgpack.encode(
            (self.inputs, self.outputs)
        )
        return FamilyId(hashlib.blake2b(encoded, digest_size=16).hexdigest())


class DeployedFunction:
    """One version of a function, or a part of one on the pool: its program, or a slice of that."""

    def __init__(self, deployment: Deployment, memory_bytes: int | None = None) -> None:
        """Create it. `memory_bytes`: the limit of all workers of the node together; None: unlimited."""
        self.deployment = deployment
        self.manifest = deployment.manifest
        self.id: FunctionId = function_id(deployment.name, deployment.version)
        device, has_handler = self.manifest.settings.device, self.manifest.handler is not None
        self.on_pool = runs_on_pool(device, is_part(deployment.name), has_handler)
        """Whether it runs on devices, as `FunctionSpec.on_pool`."""
        self.handler_only = has_handler and device == "pool"
        """Whether its workers run only its handler, and its program runs on the pool as another function."""
        self.on_either = device == "any" and not self.on_pool
        """Whether its program runs in its workers, and may run on the pool as another function."""
        self.program: DeployedFunction | None = None
        """The function that runs its program on the pool; None: it has none, or no device can run it."""
        self.slice: Slice | None = None
        """The slice of its program that it runs, if its program is cut."""
        self.later_slices: tuple[DeployedFunction, ...] = ()
        """The functions of the later slices, in order."""
        self.weight_blocks = () if self.handler_only else self.manifest.blocks
        """The blocks that its workers or executors map."""
        self.blobs = msgspec.structs.replace(self.manifest, blocks=self.weight_blocks).blobs()
        self.store = StoreName(self.manifest.tenant) if self.manifest.settings.dedicated else SHARED
        self.nbytes = sum(blob.nbytes for blob in self.manifest.blobs())
        """The bytes of all blobs of its manifest; `blobs` may be only some of them."""
        self.manifest_bytes = len(encode_manifest(self.manifest))
        self.profile: Profile | None = None
        """The measured latencies and memory of its program on this machine, or of its slice; without layers."""
        self.batch_limit: int | None = None
        """The most requests of the example's sizes in one run of its program; None: not found yet."""
        self.undivided = False
        """Whether its program could not be read when the node started, so that its parts on devices are missing."""
        self.on_trial = False
        """Whether it is on trial, and does not answer requests of callers yet."""
        self.check_publish: Callable[[], None] | None = None
        """Raises an error if it may not answer requests of callers after its trial; None: it may."""
        self.failed_preparations_left = 0 if self.handler_only else FAILED_PREPARATIONS_MAX
        """How many zygotes may still end while they compile the program; at 0 only workers compile it. 0 if its
        workers run only its handler, or after a compilation timed out.
        """
        total = total_bytes()
        self._memory_max_bytes = total if memory_bytes is None else min(total, memory_bytes)
        self._memory_limit_reason = "this machine has no more memory"
        if self._memory_max_bytes < total:
            self._memory_limit_reason = "the limit of all workers of this node is no higher (--memory-bytes)"
        self.recent_output: RecentOutput | None = None
        """The output of its family's workers; None: there were none."""
        self.trial_warning = ""
        """What the author should know about the trial."""
        self.device_warning = ""
        """Why no device can run it, although its settings allow devices."""

    def split(self, program: Program) -> None:
        """Make another function of its program, which runs on the pool."""
        name, settings = program_name(self.deployment.name), self.manifest.settings
        manifest = msgspec.structs.replace(
            self.manifest,
            name=name,
            inputs=program.inputs,
            outputs=program.outputs,
            handler=None,
            samples=(),
            # The function with the handler refuses late requests itself.
            settings=settings if self.manifest.handler is None else msgspec.structs.replace(settings, late="serve"),
        )
        deployment = msgspec.structs.replace(self.deployment, name=name, manifest=manifest)
        self.program = DeployedFunction(deployment, self._memory_max_bytes)

    def cut(self, slices: Sequence[Slice]) -> None:
        """Run its program on the pool in these slices: the first as `program`, or as this function if it has none, and
        each other as another function.
        """
        first = self.program or self
        parts = [first]
        for number in range(2, len(slices) + 1):
            name = slice_name(self.deployment.name, number)
            manifest = msgspec.structs.replace(first.manifest, name=name)
            deployment = msgspec.structs.replace(self.deployment, name=name, manifest=manifest)
            parts.append(DeployedFunction(deployment, self._memory_max_bytes))
        for at, (part, each) in enumerate(zip(parts, slices, strict=True), 1):
            part._run_slice(each)
            part.later_slices = tuple(parts[at:])

    def _run_slice(self, own: Slice) -> None:
        self.slice, self.weight_blocks = own, own.blocks
        self.blobs = msgspec.structs.replace(self.manifest, blocks=own.blocks).blobs()

    @property
    def pool_first(self) -> bool:
        """Whether its workers send their handler's calls to the pool, and run those that are too large or refused."""
        return self.on_either and self.program is not None and self.manifest.handler is not None

    def parts(self) -> "list[DeployedFunction]":
        """Return all functions that the scheduler has of it, each before those that call it."""
        on_pool = self.program or self
        return [*reversed(on_pool.later_slices), on_pool, *([] if on_pool is self else [self])]

    @property
    def run_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of its runs: those of the function, or of its slice."""
        return self.manifest.outputs if self.slice is None else self.slice.outputs

    @property
    def begins_program(self) -> bool:
        """Whether its runs begin with the first call of its program."""
        return self.slice is None or not self.slice.calls[0]

    def inputs_among(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return those of a request's tensors that its runs take."""
        if self.slice is None:
            return tensors
        wanted = {spec.name for spec in self.slice.inputs}
        return [tensor for tensor in tensors if tensor.name in wanted]

    def later_inputs_among(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return those of a request's tensors that later slices take."""
        wanted = {spec.name for part in self.later_slices if part.slice is not None for spec in part.slice.inputs}
        return [tensor for tensor in tensors if tensor.name in wanted]

    @property
    def program_part(self) -> "DeployedFunction":
        """The part that runs the program, and so has its profile."""
        return self.program if self.handler_only and self.program is not None else self

    def use_profile(self, whole: Profile | None) -> None:
        """Use the profile of its program, or the part of its slice. Layers are not kept: they are many, and only people
        read them.
        """
        profile = whole if whole is None or self.slice is None else self.slice.profile(whole)
        self.profile = None if profile is None else msgspec.structs.replace(profile, layers=())

    @property
    def memory_bytes(self) -> int:
        """The limit of the private memory of one worker: the setting, limited by the machine and the node."""
        return min(self.manifest.settings.memory_mib << 20, self._memory_max_bytes)

    def warning(self) -> str:
        """Return what the author should know; empty if there is nothing."""
        asked, most = self.manifest.settings.memory_mib, self._memory_max_bytes >> 20
        # No warning if the author left the default.
        less = asked > most and asked != Settings().memory_mib
        message = f"memory_mib {asked} is limited to {most}: {self._memory_limit_reason}" if less else ""
        untried = "its samples were not tried: its program runs on devices only" if self._ignores_samples else ""
        return "\n".join(filter(None, (self.trial_warning, self.device_warning, message, untried, self._cut_text())))

    @property
    def _ignores_samples(self) -> bool:
        return self.on_pool and self.manifest.handler is None and bool(self.manifest.samples)

    def _cut_text(self) -> str:
        count = 1 + len((self.program or self).later_slices)
        if count == 1:
            return ""
        return f"no device of this node can hold all its weights: its program is cut into {count} slices"

    @property
    def profile_key(self) -> str:
        """The key of the profile: the program, and the handler's source if there is one; not the weights."""
        handler = self.manifest.handler
        if handler is None:
            return self.program_key
        return f"{self.program_key}+{handler.source.address}{'+pool' if self.handler_only else ''}"

    @property
    def program_key(self) -> str:
        """The key of the program within its tenant, because a tenant must not learn from a profile what another one has
        deployed.
        """
        return f"{self.manifest.tenant}/{self.manifest.program.address}"

    def spec(self) -> FunctionSpec:
        """Return the function as the scheduler sees it."""
        # Workers that run only the handler do not run the program, so it is not prepared for them.
        runs = self._handler_address if self.handler_only else None
        # A slice may use only a part of a block, but all of it is loaded. The manifest has all blocks in full.
        layouts = {block.address: block.nbytes - block.weights_end for block in self.manifest.blocks}
        return FunctionSpec(
            id=self.id,
            name=self.deployment.name,
            version=self.deployment.version,
            tenant=self.manifest.tenant,
            settings=self.manifest.settings,
            program=runs or self.manifest.program.address,
            has_handler=self.manifest.handler is not None,
            blobs=tuple(_size_of(each, layouts.get(each.address, 0)) for each in self.blobs),
            profile=self.profile,
            family=FamilyId("") if self.family.alone else self.family_id,
            following=self.later_slices[0].id if self.later_slices else None,
        )

    @property
    def _handler_address(self) -> Address | None:
        handler = self.manifest.handler
        return None if handler is None else handler.source.address

    @cached_property
    def family(self) -> Family:
        """The family whose workers can run it."""
        settings, calls = self.manifest.settings, None if self.slice is None else self.slice.calls
        return Family(
            self.manifest.tenant,
            self.manifest.program.address,
            self._handler_address,
            self.manifest.inputs,
            self.manifest.outputs,
            self.store,
            (settings.threads, settings.max_batch, settings.concurrency, settings.memory_mib),
            "on the pool" if self.handler_only else "on the pool first" if self.pool_first else "in workers",
            calls,
            self.id if settings.isolation == "function" else None,
        )

    @cached_property
    def family_id(self) -> FamilyId:
        """The id of its family."""
        return self.family.id

    def check_messages(self) -> None:
        """Raise TooLargeError if a message to a zygote or a worker would be too large."""
        nbytes = len(msgspec.msgpack.encode((self.load_message(), self.bind_message(warm_up=True))))
        most = packet_bytes_max() - ENVELOPE_BYTES
        if nbytes > most:
            raise TooLargeError(
                f"the description of weights, assets, outputs and samples of {self.manifest.name!r} for a worker takes "
                f"{nbytes} bytes; at most {most}: give it fewer of them, or shorter names"
            )
        later = () if self.slice is None else self.slice.inputs
        one = max(self._request_bytes(specs) for specs in (self.manifest.inputs, self.run_outputs, later))
        batch = self.manifest.settings.max_batch
        if one * batch > most:
            raise TooLargeError(
                f"the names and shapes in a run of {batch} requests of {self.manifest.name!r} take {one * batch} "
                f"bytes; at most {most}: lower max_batch to {max(1, most // one)}, or shorten the names"
            )

    def _request_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """Return the most bytes of one request with these tensors in the message of a run."""
        metas = [TensorMeta(s.name, s.datatype, (_LARGE,) * len(s.shape), _LARGE) for s in specs]
        return len(msgspec.msgpack.encode((self.id, metas)))

    def load_message(self, cores: int = 1, concurrency: int = 1, *, bare: bool = False, measured: bool = False) -> Load:
        """The message that makes a worker load its family. Concurrent runs share cores. `bare`: without the handler,
        outputs and trial.
        """
        handler = None if bare else self.manifest.handler
        return Load(
            program=self.manifest.program.address,
            program_bytes=self.manifest.program.nbytes,
            threads=max(1, cores // concurrency),
            concurrency=concurrency,
            measured=measured,
            source_bytes=None if handler is None else handler.source.nbytes,
            inputs=() if handler is None else self.manifest.inputs,
            outputs=() if bare else self.manifest.outputs,
            on_trial=self.on_trial and not bare,
            handler_only=self.handler_only and not bare,
            pool_first=self.pool_first and not (bare or measured),
            calls=None if self.slice is None else self.slice.calls,
        )

    def bind_message(self, warm_up: bool = False, *, bare: bool = False) -> Bind:
        """Return the message to bind the function, with all its blocks; `warm_up`: first run its program on zeros."""
        blocks = {block.address: block.nbytes for block in self.weight_blocks}
        numbers = {address: number for number, address in enumerate(blocks)}
        handler = None if bare else self.manifest.handler
        assets = {} if handler is None else handler.assets
        on_trial = self.on_trial and not bare
        given = self.manifest.samples if on_trial else ()
        samples = tuple(tuple(tensor.to_tensor().meta for tensor in sample) for sample in given)
        warm_up = warm_up and not self.handler_only
        trial = Trial(warm_up, on_trial and handler is not None and not samples, samples)
        return Bind(
            function=self.id,
            blocks=tuple(blocks.items()),
            pieces=tuple((numbers[block], offset) for block, offset in weight_positions(self.weight_blocks)),
            handed=tuple(range(len(blocks))),
            assets=tuple((name, blob.address, blob.nbytes) for name, blob in assets.items()),
            trial=trial if warm_up or trial.generated or samples else None,
        )

    def samples(self) -> list[Tensor] | None:
        """Return the tensors of the requests that a worker has to answer before it is ready, in order; None if there
        are no such requests. A request may have no tensors.
        """
        if not (self.on_trial and self.manifest.samples):
            return None
        return [tensor.to_tensor() for sample in self.manifest.samples for tensor in sample]

    def files(self, *, bare: bool = False) -> list[Address]:
        """The blobs whose descriptors are sent with the load message, and then with the bind message."""
        own = list(dict.fromkeys(block.address for block in self.weight_blocks))
        return [*self.load_files(bare=bare), *own, *([] if bare else self.assets())]

    def load_files(self, *, bare: bool = False) -> list[Address]:
        """The blobs whose descriptors are sent with the load message: the program, then the source of any handler."""
        handler = None if bare else self.manifest.handler
        return [self.manifest.program.address, *([] if handler is None else [handler.source.address])]

    def assets(self) -> list[Address]:
        """The addresses of its assets, in the order of the bind message."""
        handler = self.manifest.handler
        return [] if handler is None else [blob.address for blob in handler.assets.values()]


def blobs_by_store(functions: Iterable[DeployedFunction]) -> dict[StoreName, list[Blob]]:
    """Return the blobs that these functions need, by host store."""
    blobs: dict[StoreName, list[Blob]] = {}
    for function in functions:
        blobs.setdefault(function.store, []).extend(function.blobs)
    return blobs


def _size_of(blob: Blob, layout_bytes: int) -> BlobSize:
    """Return the size of a blob in whole pages, as a host store has it. The padding, like the layout of a block, is not
    copied to devices.
    """
    nbytes = page_bytes(blob.nbytes)
    return BlobSize(blob.address, nbytes, layout_bytes + nbytes - blob.nbytes)

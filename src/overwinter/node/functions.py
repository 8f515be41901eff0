"""What the node keeps of each deployed function: how to stage it, and what a body of it must be told."""

import msgspec

from overwinter.core.errors import TooLargeError
from overwinter.core.function import BlobSize, FunctionSpec, Settings
from overwinter.core.ids import SHARED, Address, FunctionId, StoreName, function_id
from overwinter.core.profile import Profile
from overwinter.core.tensor import Tensor
from overwinter.node.pressure import total_bytes
from overwinter.store.manifest import Deployment, encode_manifest
from overwinter.store.mapping import HUGE_BYTES
from overwinter.worker.channel import PACKET_BYTES_MAX
from overwinter.worker.messages import Load

MESSAGE_BYTES_MAX = PACKET_BYTES_MAX - 1024
"""Of what a body is told when it starts; a zygote is told the same with a little around it."""
TRAYS_BYTES = 512 << 20
"""Address space for all trays of a body; larger tensors count as its own memory."""

REHEARSALS_MAX = 3
"""Zygotes that may die, of whatever, while they prepare a program; after that its bodies compile it themselves."""


class DeployedFunction:
    """One version, with the messages that never change made once."""

    def __init__(self, deployment: Deployment, memory_bytes: int | None = None) -> None:
        """`memory_bytes`: what all workers of the node together may have; None: no bound."""
        self.deployment = deployment
        self.manifest = deployment.manifest
        self.id: FunctionId = function_id(deployment.name, deployment.version)
        self.blobs = self.manifest.blobs()
        self.store = StoreName(self.manifest.tenant) if self.manifest.settings.dedicated else SHARED
        self.nbytes = sum(blob.nbytes for blob in self.blobs)
        self.manifest_bytes = len(encode_manifest(self.manifest))
        self.profile: Profile | None = None
        """What is known of its speed on this machine."""
        self.on_trial = False
        """Whether its bodies have to answer requests before they are ready."""
        self.rehearsals = REHEARSALS_MAX
        """How often its program may still be prepared: no more once it did not end, or zygotes died of it."""
        total = total_bytes()
        self._memory_max_bytes = total if memory_bytes is None else min(total, memory_bytes)
        self._has_less = "this machine has no more"
        if self._memory_max_bytes < total:
            self._has_less = "all workers of this node together may have no more (--memory-bytes)"
        self.doubts = ""
        """What its author should know of its trial."""

    @property
    def memory_bytes(self) -> int:
        """Most private memory of one body: what was asked for, as far as the machine and the node have it."""
        return min(self.manifest.settings.memory_mib << 20, self._memory_max_bytes)

    def warning(self) -> str:
        """What its author should know; empty: nothing."""
        asked, most = self.manifest.settings.memory_mib, self._memory_max_bytes >> 20
        # Who left it as it was asked for nothing.
        less = asked > most and asked != Settings().memory_mib
        told = f"memory_mib {asked} counts as {most}: {self._has_less}" if less else ""
        return "\n".join(filter(None, (self.doubts, told)))

    @property
    def subject(self) -> str:
        """What determines its speed: the program, and the handler's source where there is one; not the weights."""
        handler = self.manifest.handler
        return self.program_subject if handler is None else f"{self.program_subject}+{handler.source.address}"

    @property
    def program_subject(self) -> str:
        """The program alone. A tenant does not learn from a profile what another has deployed."""
        return f"{self.manifest.tenant}/{self.manifest.program.address}"

    def spec(self) -> FunctionSpec:
        """The function as the mind knows it."""
        return FunctionSpec(
            id=self.id,
            name=self.deployment.name,
            version=self.deployment.version,
            tenant=self.manifest.tenant,
            settings=self.manifest.settings,
            program=self.manifest.program.address,
            sandboxed=self.manifest.handler is not None,
            blobs=tuple(BlobSize(blob.address, blob.nbytes) for blob in self.blobs),
            profile=self.profile,
        )

    def mapped_bytes(self) -> int:
        """Address space that a body needs for what is not its own: blocks, with room to align them, and trays."""
        return self.nbytes + len(self.manifest.blocks) * HUGE_BYTES + TRAYS_BYTES

    def load(self, on_trial: bool = False, cores: int = 1, concurrency: int = 1) -> Load:
        """What a body of it must be told; its descriptors are those of `files`, in order. Runs at once share cores."""
        places = {
            piece.weight: (number, piece.offset)
            for number, block in enumerate(self.manifest.blocks)
            for piece in block.pieces
        }
        handler = self.manifest.handler
        return Load(
            function=self.id,
            program=self.manifest.program.address,
            program_bytes=self.manifest.program.nbytes,
            block_bytes=tuple(block.nbytes for block in self.manifest.blocks),
            pieces=tuple(places[weight] for weight in range(len(places))),
            threads=max(1, cores // concurrency),
            concurrency=concurrency,
            on_trial=on_trial,
            source_bytes=None if handler is None else handler.source.nbytes,
            inputs=self.manifest.inputs if handler is not None and self.on_trial else (),
            outputs=self.manifest.outputs,
            samples=tuple(tuple(tensor.meta for tensor in sample) for sample in self.samples()),
            assets=() if handler is None else tuple((name, blob.nbytes) for name, blob in handler.assets.items()),
        )

    def check_load(self) -> None:
        """TooLargeError if a body could not be told all of it in one message."""
        nbytes = len(msgspec.msgpack.encode(self.load(on_trial=True)))
        if nbytes > MESSAGE_BYTES_MAX:
            raise TooLargeError(
                f"what a worker of {self.manifest.name!r} must know of its weights, assets, outputs and samples takes "
                f"{nbytes} bytes; at most {MESSAGE_BYTES_MAX}: give it fewer of them, or shorter names"
            )

    def samples(self) -> list[list[Tensor]]:
        """The requests that a body has to answer before it is ready."""
        return [[tensor.given() for tensor in sample] for sample in self.manifest.samples] if self.on_trial else []

    def program_load(self, cores: int, concurrency: int) -> Load:
        """As `bare_load` for a body that is measured."""
        return msgspec.structs.replace(self.bare_load(cores, concurrency), measured=True)

    def bare_load(self, cores: int = 1, concurrency: int = 1) -> Load:
        """As `load` without the handler; its descriptors are those of `program_files`."""
        load = self.load(cores=cores, concurrency=concurrency)
        bare = {"source_bytes": None, "assets": (), "inputs": (), "outputs": (), "samples": ()}
        return msgspec.structs.replace(load, **bare)

    def program_files(self) -> list[Address]:
        """The blobs of the program and its weights."""
        return [self.manifest.program.address, *(block.address for block in self.manifest.blocks)]

    def files(self) -> list[Address]:
        """The blobs whose descriptors go with `load`."""
        addresses = self.program_files()
        if self.manifest.handler is not None:
            addresses += [self.manifest.handler.source.address]
            addresses += [blob.address for blob in self.manifest.handler.assets.values()]
        return addresses

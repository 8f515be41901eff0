"""Decides whether a device of the node has the memory for the blocks and the activations of a function of the pool, as
the device's allocator places them. If no device can hold all blocks, it decides into which slices the program is cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import mul
from typing import NamedTuple

from msgspec import structs

from overwinter.core.cutting import SLICES_MAX, balanced_starts
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ConflictError, NoSpaceError, ProgramError
from overwinter.core.ids import Address
from overwinter.core.profile import Profile
from overwinter.core.tensor import ANSWER_BYTES_MAX, TensorSpec
from overwinter.device.activations import Activations
from overwinter.device.blocks import block_bytes
from overwinter.device.partitioned import allocator_of
from overwinter.model.liveness import first_uses, input_bytes
from overwinter.model.program import Program
from overwinter.model.slicing import Slicer
from overwinter.model.structure import count_parts, slots_of
from overwinter.store.manifest import Block, Manifest, weight_positions

SLOTS_MAX = 32_768
"""The most arguments and results of calls in a program that is cut, because the node has to read it many times. No
model of `benchmarks/zoo.py` has a sixth as many.
"""
BLOCKS_MAX = 2048
"""The most blocks of a function on a device: the time to place them grows faster than their number."""
ATTEMPTS = 4
"""How many numbers of slices are tried, beginning with the fewest that may fit."""
VALUES_MAX = 256
"""The most values that a slice takes or returns, unless its program takes more: a message between processes describes
all of them.
"""
POINTS_MAX = 256
"""About this many places are considered for a cut."""


class Slice(NamedTuple):
    """A slice of a program, as a function of the pool."""

    calls: tuple[int, int]
    """Its first call, and the first after it."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    blocks: tuple[Block, ...]
    """The blocks with its weights, which are numbered as in its own program."""
    sizes: Mapping[Address, int]
    """The bytes of each block on a device, with the weights of the block that only other slices read."""
    share: float
    """Its part of the calls of the program."""
    layers: tuple[float, ...]
    """Its part of the calls of each layer of the program."""

    def profile(self, whole: Profile) -> Profile:
        """Return its part of the profile of the program: by the times of the layers, or by calls if those were not
        measured.
        """
        batches = set[int]()
        if self.layers and len(whole.layers) == len(self.layers):
            batches = set.intersection(*(set(layer.latency_s) for layer in whole.layers))
        seconds = [layer.latency_s[min(batches)] for layer in whole.layers] if batches else []
        if not sum(seconds):
            return whole.part(self.share)
        return whole.part(sum(map(mul, self.layers, seconds)) / sum(seconds))


class Placement(NamedTuple):
    """How a program runs on the devices of a node."""

    slices: Sequence[Slice] = ()
    """Those into which it is cut; empty: it runs as a whole."""
    why_not: str = ""
    """Why no device can run it, if it runs in workers instead."""


def placement(manifest: Manifest, program: Program, devices: Sequence[DeviceConfig]) -> Placement:
    """Decide how a program runs on devices, if it may. Raises the errors of `slices_for` if it can only run there."""
    if manifest.settings.device == "cpu":
        return Placement()
    if manifest.settings.device == "pool":
        return Placement(slices_for(manifest, program, devices))
    try:
        return Placement(slices_for(manifest, program, devices))
    except (ConflictError, NoSpaceError) as error:
        return Placement(why_not=f"it runs on CPU cores only: {error}")


def slices_for(manifest: Manifest, program: Program, devices: Sequence[DeviceConfig]) -> list[Slice]:
    """Return the slices into which a program is cut because no device, when empty, holds all its blocks; none
    if one does.

    Raises ConflictError if the node has no devices, and NoSpaceError if the program cannot be cut into slices that a
    device holds, or if no device that holds all its blocks has memory for what the smallest request computes.
    """
    name = manifest.name
    if not devices:
        raise ConflictError(
            f'this node has no devices for {name!r}: deploy it with device = "cpu", or start the node with --devices'
        )
    sizes = block_bytes(program.weights, first_uses(program), weight_positions(manifest.blocks))
    holding = _holding(devices, list(sizes.values()))
    if not holding:
        slots = sum(count_parts(call) + len(call.outputs) for call in program.calls)
        if slots > SLOTS_MAX:
            raise NoSpaceError(
                f"the {sum(sizes.values())} bytes of {name!r} do not fit on an empty device, and the {slots} "
                f"arguments and results of its calls are more than the {SLOTS_MAX} of a program that can be cut: serve "
                "with a larger --device-memory"
            )
        return _Cutting(manifest, program, devices, sizes).slices()
    needed = Activations(program).least_bytes()
    if all(device.activation_bytes < needed for device in holding):
        raise NoSpaceError(
            f"the smallest request to {name!r} needs {needed} bytes for what it computes, and no device that holds its "
            "weights has as many: serve with more --device-activations"
        )
    return []


def may_hold(manifest: Manifest, devices: Sequence[DeviceConfig]) -> bool:
    """Whether a device can hold all blocks, as far as the manifest alone tells: then the program is not cut."""
    sizes = [block.weights_end for block in manifest.blocks]
    return bool(_holding(devices, sizes))


def _holding(devices: Sequence[DeviceConfig], sizes: Sequence[int]) -> list[DeviceConfig]:
    """Return those of the devices that, when empty, can hold blocks of these sizes."""
    fits = {memory_bytes: _fit(memory_bytes, sizes) for memory_bytes in {each.memory_bytes for each in devices}}
    return [each for each in devices if fits[each.memory_bytes]]


def _fit(memory_bytes: int, sizes: Sequence[int]) -> bool:
    if len(sizes) > BLOCKS_MAX or sum(sizes) > memory_bytes:
        return False
    return allocator_of(memory_bytes).place(sizes) is not None


class _Cutting:
    """Finds the fewest slices of a program whose weights a device can hold, the largest as small as possible."""

    def __init__(
        self, manifest: Manifest, program: Program, devices: Sequence[DeviceConfig], sizes: Mapping[Address, int]
    ) -> None:
        self._manifest = manifest
        self._program = program
        self._devices = devices
        self._sizes = sizes
        self._most = max(device.memory_bytes for device in devices)
        self._slicer = Slicer(program)
        positions = weight_positions(manifest.blocks)
        self._blocks = [
            {positions[slot][0] for slot in slots_of(call) if slot < program.first_input} for call in program.calls
        ]
        """The blocks that each call reads."""

    def slices(self) -> list[Slice]:
        """Return the slices; raise NoSpaceError if there are none that fit."""
        self._check_calls()
        points = [0, *self._points()]
        ends = [*points[1:], len(self._program.calls)]
        parts = [self._held(start, stop).items() for start, stop in zip(points, ends, strict=True)]
        divided = (balanced_starts(parts, count, self._most) for count in range(2, SLICES_MAX + 1))
        fitting = (begins for count, begins in enumerate(divided, 2) if begins is not None and len(begins) == count)
        for begins in islice(fitting, ATTEMPTS):
            starts = [points[begin] for begin in begins]
            found = [self._slice(*each) for each in zip(starts, [*starts[1:], ends[-1]], strict=True)]
            if all(each is not None for each in found):
                return [each for each in found if each is not None]
        name, total = self._manifest.name, sum(self._sizes.values())
        largest = max(sum(nbytes for _, nbytes in part) for part in parts)
        raise NoSpaceError(
            f"the {total} bytes of {name!r} in {len(self._sizes)} blocks, the largest of {max(self._sizes.values())}, "
            f"do not fit on an empty device of {self._most} bytes, nor does a cut into up to {SLICES_MAX} slices that "
            f"was tried; its program has parts of up to {largest} bytes that cannot be cut: serve with a larger "
            "--device-memory or --device-activations, or store its weights in fewer bytes"
        )

    def _check_calls(self) -> None:
        """Raise NoSpaceError if the weights of a single call fit on no device."""
        for call, blocks in zip(self._program.calls, self._blocks, strict=True):
            sizes = [self._sizes[block] for block in blocks]
            if 2 * sum(sizes) > self._most and not _holding(self._devices, sizes):
                raise NoSpaceError(
                    f"the {sum(sizes)} bytes of weights that one call of {self._manifest.name!r} reads, "
                    f"{call.operator}, do not fit on an empty device of {self._most} bytes: serve with a larger "
                    "--device-memory, or store its weights in fewer bytes"
                )

    def _points(self) -> Iterator[int]:
        """Yield the calls before which the program may be cut: of the places between two calls with weights, the one
        across which the fewest bytes are alive.
        """
        step = sum(self._sizes.values()) // POINTS_MAX
        seen, since = set[Address](), 0
        between: list[tuple[int, int]] = []
        at = 0
        for cut, nbytes in self._slicer.cuts():
            for blocks in self._blocks[at:cut]:
                if blocks and between and since > step:
                    yield min(between)[1]
                    since = 0
                if blocks:
                    between = []
                since += sum(self._sizes[block] for block in blocks - seen)
                seen |= blocks
            at = cut
            between.append((nbytes, cut))
        if between:
            yield min(between)[1]

    def _held(self, start: int, stop: int) -> dict[Address, int]:
        blocks = set[Address]().union(*self._blocks[start:stop])
        return {block: self._sizes[block] for block in sorted(blocks)}

    def _slice(self, start: int, stop: int) -> Slice | None:
        """Return a slice; None if the program cannot be cut there, no device can run it, or its values are too many or
        too large to be sent.
        """
        try:
            program = self._slicer.slice(start, stop)
        except ProgramError:
            return None
        if max(len(program.inputs), len(program.outputs)) > max(VALUES_MAX, len(self._program.inputs)):
            return None
        numbers = {weight.name: number for number, weight in enumerate(program.weights)}
        kept = {old: numbers[each.name] for old, each in enumerate(self._program.weights) if each.name in numbers}
        blocks = []
        for block in self._manifest.blocks:
            pieces = [
                structs.replace(piece, weight=kept[piece.weight]) for piece in block.pieces if piece.weight in kept
            ]
            if pieces:
                blocks.append(structs.replace(block, pieces=tuple(pieces)))
        sizes = {block.address: self._sizes[block.address] for block in blocks}
        holding = _holding(self._devices, list(sizes.values()))
        least = {dimension: low for dimension, (low, _) in program.dimensions.items()}
        sent = stop < len(self._program.calls)
        if sent and sum(input_bytes(spec, least) for spec in program.outputs) > ANSWER_BYTES_MAX:
            return None
        needed = Activations(program).least_bytes()
        if all(device.activation_bytes < needed for device in holding):
            return None
        share = (stop - start) / len(self._program.calls)
        layers = tuple(
            max(0, min(stop, each.stop) - max(start, each.start)) / (each.stop - each.start)
            for each in self._program.layers
        )
        return Slice((start, stop), program.inputs, program.outputs, tuple(blocks), sizes, share, layers)

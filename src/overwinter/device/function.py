"""A function as a device runs it: its program, compiled once, and the position of each weight in a block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from overwinter.core.ids import Address, TenantId
from overwinter.device.blocks import WeightPosition, block_bytes
from overwinter.device.interface import Copy, Device
from overwinter.model.compile import Compiled, Waiting, compile_program, compile_waiting
from overwinter.model.liveness import first_uses
from overwinter.model.program import Program
from overwinter.model.structure import Weight
from overwinter.model.weight_layout import strides


class DeviceProgram:
    """A program without weights, which functions with the same program share. Each of its forms is compiled when it is
    first needed.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program = program
        self.device = device
        self.first_uses = first_uses(program)

    @cached_property
    def run(self) -> Compiled:
        """The compiled program for runs whose weights have all arrived before."""
        return compile_program(self.program, device=self.device)

    @cached_property
    def run_waiting(self) -> Waiting:
        """The compiled program for runs during which weights arrive: it waits for them before their first use."""
        return compile_waiting(self.program, frozenset(self.first_uses), self.device)


class EmptyProgram(DeviceProgram):
    """A program that computes nothing, and ends when all blocks of its function have arrived."""

    def __init__(self, program: DeviceProgram) -> None:
        self.program = program.program
        self.device = program.device
        self.first_uses = program.first_uses
        self.run = lambda weights, inputs: ()
        self.run_waiting = self._wait

    def _wait(
        self, weights: Sequence[torch.Tensor], inputs: Sequence[Any], wait: Callable[[int], None]
    ) -> tuple[torch.Tensor, ...]:
        for call in sorted(set(self.first_uses)):
            wait(call)
        return ()


class _View(NamedTuple):
    """Where a weight lies in a block, in elements."""

    address: Address
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class DeviceFunction:
    """A program and the blocks of its weights."""

    def __init__(
        self,
        name: str,
        tenant: TenantId,
        program: DeviceProgram,
        positions: Sequence[WeightPosition],
        sizes: Mapping[Address, int] = MappingProxyType({}),
    ) -> None:
        """`sizes`: the bytes to bring of blocks of which it uses only a part. Other functions may use other parts."""
        self.name = name
        self.tenant = tenant
        self.program = program
        self.positions = positions
        self._positions = [
            (*position, weight) for position, weight in zip(positions, program.program.weights, strict=True)
        ]
        self._views = [_view(*position) for position in self._positions]
        self._bound: tuple[Device, int, list[torch.Tensor]] | None = None
        """The weights on a device, and the version of its placement when they were made."""
        used = block_bytes(program.program.weights, program.first_uses, positions)
        self.blocks = {address: sizes.get(address, nbytes) for address, nbytes in used.items()}
        """The bytes of each block to bring, by default up to the end of its last weight, in first-use order."""
        self._first_uses: dict[Address, int] = {}
        for use, (address, _) in sorted(zip(program.first_uses, positions, strict=True), key=lambda pair: pair[0]):
            self._first_uses.setdefault(address, use)

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return sum(self.blocks.values())

    def block_copies(self, missing: Mapping[Address, int]) -> list[tuple[Copy, int]]:
        """Return these blocks in first-use order, each with the call that first uses it."""
        return [
            (Copy(address, 0, missing[address]), self._first_uses[address])
            for address in self.blocks
            if address in missing
        ]

    def weight_copies(self, missing: Mapping[Address, int]) -> list[tuple[Copy, int]]:
        """Return the weights in these blocks in first-use order, each with the call that first uses it."""
        copies = [
            (Copy(address, offset, weight.nbytes), use)
            for (address, offset, weight), use in zip(self._positions, self.program.first_uses, strict=True)
            if address in missing
        ]
        return sorted(copies, key=lambda pair: pair[1])

    def bind(self, device: Device) -> list[torch.Tensor]:
        """Return the weights as tensors in the device's memory, in which their bytes may still have to arrive.

        They are made again only if a block may lie elsewhere, because that takes microseconds for each.
        """
        version = device.placement_version(self.name)
        if self._bound is None or self._bound[:2] != (device, version):
            with torch.inference_mode():
                self._bound = device, version, list(self._on(device))
        return self._bound[2]

    def _on(self, device: Device) -> Iterator[torch.Tensor]:
        """Yield the weights. The first of a block and a datatype gets the block's storage, and the others view it."""
        first: dict[tuple[Address, torch.dtype], torch.Tensor] = {}
        for address, dtype, offset, shape, strides_ in self._views:
            weight = first.get((address, dtype))
            if weight is None:
                weight = torch.empty(0, dtype=dtype, device=device.torch_device)
                first[address, dtype] = weight.set_(device.storage(address), offset, shape, strides_)
            else:
                weight = weight.as_strided(shape, strides_, offset)
            yield weight


def _view(address: Address, offset: int, weight: Weight) -> _View:
    dtype: torch.dtype = getattr(torch, weight.dtype)
    return _View(address, dtype, offset // dtype.itemsize, weight.shape, strides(weight))

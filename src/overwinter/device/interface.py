"""What every device offers: an arena, a copy stream with events, and runs of programs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from overwinter.core.ids import Address, TenantId
from overwinter.device.link import Link
from overwinter.model.compile import Compiled, Waiting


class UnusableDeviceError(BaseException):
    """Blocks may not lie where the device takes them to be. This is no Exception: the process must end, because later
    runs would answer wrongly.
    """


class Copy(NamedTuple):
    """A part of a block, to be copied to the same part of that block on a device."""

    address: Address
    offset: int
    nbytes: int


class Event(Protocol):
    """A point in a copy stream."""

    def wait(self) -> None:
        """Return when all copies up to this point are done, or let the work that follows on the device wait for them;
        raise the error if the transfer that ends here is known to have failed.
        """
        ...

    def bytes_by_path(self) -> Sequence[int] | None:
        """Wait for the transfer, and return the bytes that came over each path; None: it failed."""
        ...


def _never(_: Address) -> bool:
    return False


class FoundBlocks(NamedTuple):
    """Blocks of a source, to be copied."""

    blocks: Mapping[Address, torch.Tensor]
    """The bytes of each block, flat."""
    has_changed: Callable[[Address], bool] = _never
    """Whether a block may have changed since it was found. If so, what was copied of it is void."""


class Source(Protocol):
    """A place that blocks are copied from: the host store, or another device."""

    def find(self, blocks: Mapping[Address, int]) -> FoundBlocks:
        """Return those of these blocks that the source has. `blocks`: the bytes of each."""
        ...


class CopyPath(NamedTuple):
    """One way for blocks to a device: those that its source has, and the link over which they come."""

    found: FoundBlocks
    link: Link


class Device(Protocol):
    """Memory for blocks, and programs that run over them. One thread uses a device at a time."""

    name: str
    torch_device: torch.device

    def placement_version(self, holder: str) -> int:
        """Return a number that changes whenever blocks of the holder may have been moved."""
        ...

    def missing(self, blocks: Mapping[Address, int]) -> dict[Address, int]:
        """Return those of these blocks that do not lie here, with their bytes."""
        ...

    def hold(self, holder: str, tenant: TenantId, blocks: Mapping[Address, int]) -> tuple[Address, ...] | None:
        """Give each block memory until the holder (a function) is evicted; the block's position may change. Return the
        new blocks, whose bytes are to be copied, or None if they do not fit.

        The memory of the new ones holds no byte of another tenant. Raises UnusableDeviceError if blocks could not be
        moved; after another error the holder is to be evicted.
        """
        ...

    def evict(self, holder: str) -> tuple[Address, ...]:
        """Forget a holder, and the blocks that nobody else holds; return those. Nothing is copied back."""
        ...

    def storage(self, address: Address) -> torch.UntypedStorage:
        """Return the memory of a block, whose bounds no tensor in it can leave. `hold` may move the block to other
        memory, to make free memory contiguous.
        """
        ...

    def host(self, blocks: Mapping[Address, torch.Tensor]) -> Source:
        """Return a source of these blocks of the host store, prepared for fast copies to this device. It keeps the
        blocks as long as it exists.
        """
        ...

    def copy(self, copies: Sequence[Copy], paths: Sequence[CopyPath]) -> Event:
        """Copy parts of blocks as one transfer, after all copies that were asked for before. What does not come
        over the first path, because its source has evicted or moved it meanwhile, comes over the next.
        """
        ...

    def bring(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs of a program in the memory of this device. A run calls this before it copies any block:
        behind its blocks, the inputs would wait for the link.
        """
        ...

    def run(
        self,
        program: Compiled | Waiting,
        weights: Sequence[torch.Tensor],
        *arguments: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Run a program that was compiled for this device, with inputs that were brought here. Its outputs are in the
        host's memory, and stay valid after an eviction.
        """
        ...

    def fault(self) -> str | None:
        """Return why the device is unusable in this process, or None."""
        ...

    def close(self) -> None:
        """Wait for the copies, and end. No tensor in the memory may be used afterwards."""
        ...

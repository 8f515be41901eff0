"""An NVIDIA GPU: an arena in its memory, a stream for copies, and programs that run there."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from overwinter.core.errors import ActivationsError, WorkerError
from overwinter.core.ids import Address
from overwinter.device import driver
from overwinter.device.allocation import Allocator, Move
from overwinter.device.host import HostBlocks
from overwinter.device.interface import Copy, CopyPath, Event, FoundBlocks
from overwinter.device.reserved import ReservedDevice
from overwinter.model.compile import Compiled, Waiting

LIBRARIES_BYTES = 256 << 20
"""The memory of a GPU that PyTorch may allocate for libraries and kernels, besides the arena and activations."""


class Registration:
    """Memory of the host that the GPU copies directly, as long as this object exists. Registering takes nearly as long
    as a copy from unregistered memory, so it is done once for each block.
    """

    def __init__(self, content: torch.Tensor) -> None:
        # Memory that the system does not register is copied all the same, only slower.
        self._content = content
        if driver.register(content.data_ptr(), content.nbytes):
            # The finalizer runs before the attribute is cleared, so the memory is still mapped.
            weakref.finalize(self, driver.unregister, content.data_ptr()).atexit = False


class CudaEvent(Event):
    """A point in the copy stream."""

    def __init__(self, point: torch.cuda.Event | RuntimeError, nbytes: int) -> None:
        """`point`: the point, or the error if the copies could not be enqueued."""
        self._point = point
        self._nbytes = nbytes

    def wait(self) -> None:
        """Let the work that follows in the current stream wait for the copies. The caller does not wait. Raises the
        error if the copies could not be enqueued.
        """
        if isinstance(self._point, RuntimeError):
            raise self._point
        torch.cuda.current_stream().wait_event(self._point)

    def bytes_by_path(self) -> Sequence[int] | None:
        """Wait for the transfer, and return the bytes that came; None: it failed."""
        if isinstance(self._point, RuntimeError):
            return None
        try:
            self._point.synchronize()
        except RuntimeError:
            return None
        return (self._nbytes,)


class CudaDevice(ReservedDevice):
    """A GPU. Its process uses no other one."""

    def __init__(self, name: str, allocator: Allocator, gpu: int = 0, activation_bytes: int | None = None) -> None:
        """Reserve all of the allocator's memory. `activation_bytes`: the most for activations; None: what is left.
        Raises WorkerError, which names the device, if PyTorch cannot use this GPU, and PyTorch's OutOfMemoryError if
        the GPU has too little free memory.
        """
        check_gpu(name, gpu)
        torch.cuda.set_device(gpu)
        # The answers should be those of the CPU as closely as possible.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        if activation_bytes is not None:
            _, total = torch.cuda.mem_get_info(gpu)
            most = allocator.nbytes + activation_bytes + LIBRARIES_BYTES
            torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), gpu)
        memory = torch.zeros(allocator.nbytes, dtype=torch.uint8, device=torch.device("cuda", gpu))
        super().__init__(name, allocator, memory)
        self._stream = torch.cuda.Stream()
        self._registered: weakref.WeakValueDictionary[int, Registration] = weakref.WeakValueDictionary()
        self._load_libraries()

    def close(self) -> None:
        """Wait for all work. No tensor in the arena may be used afterwards."""
        # After a fault nothing is left to wait for.
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    def fault(self) -> str | None:
        """Return why the GPU is unusable in this process, or None."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    def host(self, blocks: Mapping[Address, torch.Tensor]) -> "RegisteredBlocks":
        """Return these blocks as a source. Each is registered when it is first looked for, unless it is already."""
        return RegisteredBlocks(blocks, self._registration_of)

    def _registration_of(self, content: torch.Tensor) -> Registration:
        known = self._registered.get(content.data_ptr()) or Registration(content)
        self._registered[content.data_ptr()] = known
        return known

    def copy(self, copies: Sequence[Copy], paths: Sequence[CopyPath]) -> CudaEvent:
        """Copy parts of blocks as one transfer, after all copies and all work that were enqueued before: that work may
        still read what lay in the same memory. The links of `paths` are not used, because the device has a real one.
        Sources keep their blocks, so each block is copied from the first path whose source has it.
        """
        point = torch.cuda.Event()
        try:
            self._stream.wait_stream(torch.cuda.default_stream())
            for copy in copies:
                self._copy(copy, paths)
            point.record(self._stream)
        except RuntimeError as error:
            # The function is evicted next, so nothing may still be written to its places.
            with suppress(RuntimeError):
                self._stream.synchronize()
            return CudaEvent(error, 0)
        return CudaEvent(point, sum(copy.nbytes for copy in copies))

    def _copy(self, copy: Copy, paths: Sequence[CopyPath]) -> None:
        address, offset, nbytes = copy
        source = next(path.found.blocks[address] for path in paths if address in path.found.blocks)
        extent = self._arena.extent(address)
        most = min(extent.nbytes, source.nbytes)
        if offset + nbytes > most:
            raise RuntimeError(f"block {address} has only {most} bytes")
        target = self._memory.data_ptr() + extent.offset + offset
        driver.copy_to_gpu(target, source.data_ptr() + offset, nbytes, self._stream.cuda_stream)

    def bring(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs in the GPU's memory. Raises ActivationsError if it has too little."""
        with _enough_memory(self.name):
            return [each.to(self.torch_device) if isinstance(each, torch.Tensor) else each for each in inputs]

    def run(
        self, program: Compiled | Waiting, weights: Sequence[torch.Tensor], *arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        """Run a compiled program in the current stream, and bring its outputs to the host. Raises ActivationsError if
        the GPU has too little memory.
        """
        with torch.inference_mode(), _enough_memory(self.name):
            outputs = program(weights, *arguments)
            return tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in outputs)

    def _move(self, moves: Sequence[Move]) -> None:
        """Move the bytes of blocks to their new positions."""
        torch.cuda.current_stream().wait_stream(self._stream)  # Enqueued copies still write to the old positions.
        super()._move(moves)

    def _load_libraries(self) -> None:
        """Let PyTorch load the libraries for matrix products and convolutions, for which the first run would wait."""
        with torch.inference_mode():
            image = torch.ones(1, 1, 8, 8, device=self.torch_device)
            torch.nn.functional.conv2d(image, image[..., :3, :3]).sum().item()
            (image[0, 0] @ image[0, 0]).sum().item()


class RegisteredBlocks(HostBlocks):
    """Blocks of the host store. Those that were looked for stay registered as long as this object exists."""

    def __init__(
        self, blocks: Mapping[Address, torch.Tensor], register: Callable[[torch.Tensor], Registration]
    ) -> None:
        """`register`: registers the content of a block, or returns its registration."""
        super().__init__(blocks)
        self._register = register
        self._registrations: dict[Address, Registration] = {}

    def find(self, blocks: Mapping[Address, int]) -> FoundBlocks:
        """Return those of these blocks that are here, registered. `blocks`: the bytes of each."""
        found = super().find(blocks)
        for address, content in found.blocks.items():
            if content.nbytes and address not in self._registrations:
                self._registrations[address] = self._register(content)
        return found


@contextmanager
def _enough_memory(name: str) -> Iterator[None]:
    """Raise ActivationsError if the GPU has too little free memory for a run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ActivationsError(
            f"{name} has too little free memory for what this run computes: send less at once, or serve with a larger "
            "--device-activations, or with a smaller --device-memory if the GPU has no more"
        ) from error


def check_gpu(name: str, gpu: int) -> None:
    """Raise WorkerError if PyTorch cannot use this GPU."""
    if not torch.backends.cuda.is_built():
        raise WorkerError(f"device {name}: PyTorch {torch.__version__} was built without CUDA; install a build with it")
    count = torch.cuda.device_count()
    if gpu >= count:
        raise WorkerError(f"device {name} would be GPU {gpu}, and PyTorch finds {count} on this machine")

"""What can never fit, so that it is refused before anything is evicted for it."""

from collections.abc import Sequence

from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import FunctionId
from overwinter.scheduler.state import Function


def why_never_fits(function: Function, limit: int, pinned: int) -> str | None:
    """Return why no eviction can free enough space in the host store, of which others have pinned `pinned` bytes; None:
    evictions can.
    """
    size = sum(function.sizes.values())
    if size + pinned <= limit:
        return None
    beside = " beside what others have pinned" if pinned else ""
    remedy = "make the host store larger (host_bytes)" + (", or unpin functions" if pinned else "")
    return f"function {function.spec.id} needs {size} bytes of the host store, which has less{beside}: {remedy}"


def why_never_runs(function: Function) -> str | None:
    """Return why no worker of a function can start: even its smallest one needs more memory than all workers together
    may have; None: one can, or has started, or a device runs the function.
    """
    needed = function.latency.too_large_bytes
    if needed is None or function.has_usable_worker or function.pool is not None:
        return None
    why = f"a worker of function {function.spec.id} needs {needed} bytes, more than all workers together may have"
    return f"{why}: raise memory_bytes"


def why_no_device(devices: Sequence[DeviceConfig], id_: FunctionId, nbytes: int) -> str:
    """Return why no device can ever run a function; empty: one can."""
    if not devices:
        return (
            f"function {id_} is declared for the pool, and this node has no devices: start the node with --devices, or "
            'deploy it with device = "cpu"'
        )
    largest = max(devices, key=lambda each: each.memory_bytes)
    if nbytes <= largest.memory_bytes:
        return ""
    return (
        f"function {id_} needs {nbytes} bytes on a device, and the largest, {largest.name}, has "
        f"{largest.memory_bytes}: serve with a larger device, or store its weights in fewer bytes"
    )

"""Whether a device of the node can run a function of the pool: checked at its deploy, by the rules of the device."""

from collections.abc import Sequence

from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ConflictError, NoSpaceError
from overwinter.device.activations import Activations
from overwinter.device.blocks import block_bytes
from overwinter.device.partitioned import allocator_of
from overwinter.model.liveness import first_uses
from overwinter.model.program import Program
from overwinter.store.manifest import Manifest, weight_places


def check_devices_fit(manifest: Manifest, program: Program, devices: Sequence[DeviceConfig]) -> None:
    """Raise ConflictError if the node has no devices, and NoSpaceError if none of them, when empty, has places for all
    blocks and memory for what the smallest request computes.
    """
    name = manifest.name
    if not devices:
        raise ConflictError(
            f'this node has no devices for {name!r}: deploy it with device = "cpu", or start the node with --devices'
        )
    sizes = list(block_bytes(program.weights, first_uses(program), weight_places(manifest.blocks)).values())
    holding = [device for device in devices if allocator_of(device.memory_bytes).place(sizes) is not None]
    if not holding:
        raise NoSpaceError(
            f"the {sum(sizes)} bytes of {name!r} in {len(sizes)} blocks, the largest of {max(sizes)}, find no place on "
            "an empty device of this node: serve with a larger --device-memory, or store its weights in fewer bytes"
        )
    needed = Activations(program).least_bytes()
    if all(device.activation_bytes < needed for device in holding):
        raise NoSpaceError(
            f"the smallest request to {name!r} needs {needed} bytes for what it computes, and no device that holds its "
            "weights has as many: serve with more --device-activations"
        )

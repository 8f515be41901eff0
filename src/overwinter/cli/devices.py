"""The options that describe the devices of a node. All devices of a node are alike."""

import os
from typing import Any, get_args

import click
from msgspec import structs

from overwinter.cli.options import byte_size, size_text
from overwinter.core.devices import ACTIVATION_BYTES, DEVICE_BOUNDS, DeviceConfig, DeviceKind
from overwinter.core.ids import DeviceId
from overwinter.core.policies import DeviceBinding, DeviceEviction, DeviceOrder, Policy, policy_named

DEVICES_MAX = 64
MEMORY_BYTES = 1 << 30
LINK_BYTES_PER_S = 12_000_000_000
_POLICY = Policy()
_DECISIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "device_order": (
        get_args(DeviceOrder),
        "Whose request gets the next free device. rrc: by the required request count, as in Torpor. fifo: by arrival. "
        "due-time: by the SLO.",
    ),
    "device_binding": (
        get_args(DeviceBinding),
        "Which free device a request gets. missing-bytes: the one on which its run waits least for blocks. torpor: "
        "Torpor's algorithm. random: one that has all blocks, or any. native, infless: always the same one; infless: "
        "until the function was idle for its keep-alive.",
    ),
    "device_eviction": (get_args(DeviceEviction), "Which function is evicted from a full device."),
}
"""The decisions on devices for which a policy can be selected, each with its policies and a help text."""


def device_options() -> list[click.Option]:
    """Return the options."""
    return [
        click.Option(
            ["--devices"],
            type=click.IntRange(0, DEVICES_MAX),
            metavar="NUMBER",
            default=0,
            help="Number of devices of the pool, each with its own memory and link.",
        ),
        click.Option(
            ["--device-kind"],
            type=click.Choice(get_args(DeviceKind)),
            default="virtual",
            show_default=True,
            help="virtual: computes on the CPU. cuda: the first NVIDIA GPUs of this machine. null: moves no bytes, "
            "takes the times in the profiles of functions, and answers as if all weights and inputs were zeros.",
        ),
        click.Option(
            ["--device-memory"],
            type=byte_size,
            metavar="SIZE",
            default=size_text(MEMORY_BYTES).replace(" ", ""),
            help="Memory of each device for weights.",
        ),
        click.Option(
            ["--device-activations"],
            type=byte_size,
            metavar="SIZE",
            default=size_text(ACTIVATION_BYTES).replace(" ", ""),
            help="Memory of each device for inputs, results and temporary values of runs, besides the weights.",
        ),
        click.Option(
            ["--device-bandwidth"],
            type=byte_size,
            metavar="SIZE",
            default=f"{LINK_BYTES_PER_S // 10**9}GB",
            help="Bytes per second from the host to each device.",
        ),
        click.Option(
            ["--devices-per-switch"],
            type=click.IntRange(1, DEVICES_MAX),
            metavar="NUMBER",
            default=1,
            help="Devices behind one switch, which share the bandwidth of one link. 1: each has its own.",
        ),
        click.Option(
            ["--device-peer-bandwidth"],
            type=byte_size,
            metavar="SIZE",
            default=None,
            help="Bytes per second from each device to each other one. [default: no links between devices]",
        ),
        *(
            click.Option(
                [f"--{name.replace('_', '-')}"], type=click.Choice(choices), default=getattr(_POLICY, name), help=text
            )
            for name, (choices, text) in _DECISIONS.items()
        ),
    ]


_BOUNDED = {
    "--device-memory": "memory_bytes",
    "--device-activations": "activation_bytes",
    "--device-bandwidth": "bytes_per_s",
}
"""The numbers of a device by the option that sets them: an error names the option."""


def devices_of(values: dict[str, Any]) -> tuple[DeviceConfig, ...]:
    """Remove these options from `values`, and return the devices. Raises ValueError for impossible ones."""
    if not values["devices"]:
        _check_defaults(values)
    names = ("devices", "devices_per_switch", "device_peer_bandwidth")
    count, per_switch, peer_bytes_per_s = (values.pop(name) for name in names)
    kind: DeviceKind = values.pop("device_kind")
    for option, bounded in _BOUNDED.items():
        given = values[option.removeprefix("--").replace("-", "_")]
        if fault := DEVICE_BOUNDS[bounded].fault(option, given):
            raise ValueError(fault)
    if count and kind == "cuda":
        check_environment()
    template = DeviceConfig(
        name=DeviceId(kind),
        kind=kind,
        memory_bytes=values.pop("device_memory"),
        activation_bytes=values.pop("device_activations"),
        bytes_per_s=float(values.pop("device_bandwidth")),
    )
    devices = [DeviceId(f"{kind}:{number}") for number in range(count)]
    return tuple(
        structs.replace(
            template,
            name=device,
            gpu=number if kind == "cuda" else 0,
            switch=f"switch:{number // per_switch}" if per_switch > 1 else "",
            peers={peer: float(peer_bytes_per_s) for peer in devices if peer_bytes_per_s and peer != device},
        )
        for number, device in enumerate(devices)
    )


def policy_of(values: dict[str, Any]) -> str | Policy:
    """Remove these options from `values`, and return the node's policy with the selected ones for devices."""
    chosen = {name: values.pop(name) for name in _DECISIONS}
    policy: str = values["policy"]
    changed = structs.replace(policy_named(policy), **chosen)
    return policy if changed == policy_named(policy) else changed


def _check_defaults(values: dict[str, Any]) -> None:
    """Raise ValueError if an option describes devices of a node that has none."""
    for option in device_options():
        if values[option.name or ""] != option.type(option.default):
            raise ValueError(f"{option.opts[0]} describes devices, and this node has none: give --devices NUMBER too")


def check_environment() -> None:
    """Raise ValueError if CUDA_VISIBLE_DEVICES is set: executors do not get it, and would use GPUs that it excludes."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        raise ValueError(
            "CUDA_VISIBLE_DEVICES is set, but a node always uses the first GPUs of the machine in the order of their "
            "PCI addresses: unset it"
        )

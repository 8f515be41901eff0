"""The options of a node that describe its devices; the same for all of them."""

import os
from typing import Any, get_args

import click
from msgspec import structs

from overwinter.cli.options import byte_size, size_text
from overwinter.core.devices import ACTIVATION_BYTES, DeviceConfig, DeviceKind
from overwinter.core.ids import DeviceId

DEVICES_MAX = 64
MEMORY_BYTES = 1 << 30
LINK_BYTES_PER_S = 12_000_000_000


def device_options() -> list[click.Option]:
    """Create the options."""
    return [
        click.Option(
            ["--devices"],
            type=click.IntRange(0, DEVICES_MAX),
            metavar="NUMBER",
            default=0,
            help="Devices of the pool, each with a memory and a link of its own.",
        ),
        click.Option(
            ["--device-kind"],
            type=click.Choice(get_args(DeviceKind)),
            default="virtual",
            show_default=True,
            help="virtual: computes on the CPU. cuda: GPUs of this machine, from the first on. null: takes the "
            "times in the profiles of functions, and answers as if all weights and inputs were zeros.",
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
            help="Memory of each device for what a run computes, in addition to the weights.",
        ),
        click.Option(
            ["--device-bandwidth"],
            type=byte_size,
            metavar="SIZE",
            default=f"{LINK_BYTES_PER_S // 10**9}GB",
            help="Bytes per second from the host to each device.",
        ),
        click.Option(
            ["--device-switch"],
            type=click.IntRange(1, DEVICES_MAX),
            metavar="NUMBER",
            default=1,
            help="Devices behind one switch, which has the bandwidth of one link for all of them.",
        ),
        click.Option(
            ["--device-peers"],
            type=byte_size,
            metavar="SIZE",
            help="Bytes per second from each device to each other. [default: no links between devices]",
        ),
    ]


def devices_of(values: dict[str, Any]) -> tuple[DeviceConfig, ...]:
    """Take these options out of `values`, and return the devices. Raises ValueError for impossible ones."""
    number, behind, peer_bytes_per_s = (values.pop(name) for name in ("devices", "device_switch", "device_peers"))
    kind: DeviceKind = values.pop("device_kind")
    if number and kind == "cuda":
        check_environment()
    alike = DeviceConfig(
        name=DeviceId(kind),
        kind=kind,
        memory_bytes=values.pop("device_memory"),
        activation_bytes=values.pop("device_activations"),
        bytes_per_s=float(values.pop("device_bandwidth")),
    )
    names = [DeviceId(f"{kind}:{each}") for each in range(number)]
    return tuple(
        structs.replace(
            alike,
            name=name,
            gpu=each if kind == "cuda" else 0,
            switch=f"switch:{each // behind}" if behind > 1 else "",
            peers={peer: float(peer_bytes_per_s) for peer in names if peer_bytes_per_s and peer != name},
        )
        for each, name in enumerate(names)
    )


def check_environment() -> None:
    """Raise ValueError if the environment selects GPUs, which executors would not see."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        raise ValueError(
            "CUDA_VISIBLE_DEVICES is set, and a node uses the GPUs of the machine in the order of their PCI addresses, "
            "from the first on: unset it"
        )

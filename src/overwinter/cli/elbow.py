"""The command that measures the link to a device, and thus the best size of the groups in which blocks are copied."""

import os

import click

from overwinter.cli.devices import check_environment, device_options
from overwinter.cli.options import as_json, print_json
from overwinter.cli.serve import config_options
from overwinter.core.devices import DeviceKind

MIB = 1 << 20


@click.command(
    params=[
        *(option for option in config_options() if option.name == "data"),
        *(option for option in device_options() if option.name in ("device_kind", "device_bandwidth")),
    ],
    context_settings={"auto_envvar_prefix": "OVERWINTER"},
)
@as_json
def elbow(data: str, device_kind: DeviceKind, device_bandwidth: int, as_json: bool) -> None:
    """Measure transfers to a device by size, and store the elbow: the smallest that comes near the best throughput.

    A node that starts with this data directory, on this machine, with devices behind such a link, brings blocks in
    groups of that size. Run nothing else on the machine meanwhile. Of several GPUs the first one is measured.
    """
    from pathlib import Path

    from overwinter.core.devices import DeviceConfig
    from overwinter.core.errors import WorkerError
    from overwinter.core.ids import DeviceId
    from overwinter.device.swap import elbow as elbow_of
    from overwinter.profiling.links import SIZES, link_times
    from overwinter.profiling.machine import fingerprint
    from overwinter.server import GPU_ENVIRONMENT
    from overwinter.store.elbows import Elbow, put_elbow

    if device_kind == "cuda":
        try:
            check_environment()
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        # So that the first GPU here is also the first one of a node.
        os.environ.update(GPU_ENVIRONMENT)
    name, bandwidth = DeviceId(f"{device_kind}:0"), float(device_bandwidth)
    try:
        config = DeviceConfig(name=name, kind=device_kind, memory_bytes=SIZES[-1], bytes_per_s=bandwidth)
    except ValueError as error:
        raise click.UsageError(f"--device-bandwidth: {error}") from error
    try:
        times = link_times(config)
    except (WorkerError, RuntimeError) as error:
        raise click.ClickException(f"the link to {name} cannot be measured: {error}") from error
    found = Elbow(
        machine=fingerprint(),
        kind=config.kind,
        bytes_per_s=config.bytes_per_s,
        latency_s=config.latency_s,
        group_bytes=elbow_of(times),
    )
    put_elbow(Path(data).expanduser(), found)
    if as_json:
        print_json({"group_bytes": found.group_bytes, "seconds": {str(size): each for size, each in times.items()}})
        return
    best = max(nbytes / seconds for nbytes, seconds in times.items())
    for nbytes, seconds in times.items():
        mark = "  elbow" if nbytes == found.group_bytes else ""
        click.echo(f"{nbytes / MIB:9.4g} MiB {nbytes / seconds / 1e9:8.2f} GB/s {nbytes / seconds / best:6.0%}{mark}")

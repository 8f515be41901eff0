"""The command that measures the link to a device, for the groups in which blocks are brought."""

import click

from overwinter.cli.devices import device_options
from overwinter.cli.options import as_json, print_json
from overwinter.cli.serve import configured

MIB = 1 << 20


@click.command(
    params=[
        *(option for option in configured() if option.name == "data"),
        *(option for option in device_options() if option.name == "device_bandwidth"),
    ],
    context_settings={"auto_envvar_prefix": "OVERWINTER"},
)
@as_json
def elbow(data: str, device_bandwidth: int, as_json: bool) -> None:
    """Measure transfers to a device by size, and store the elbow: the smallest that comes near the best throughput.

    A node that starts with this data directory, on this machine, with devices behind such a link, brings blocks in
    groups of that size. Stop other load meanwhile.
    """
    from pathlib import Path

    from overwinter.core.devices import DeviceConfig
    from overwinter.core.ids import DeviceId
    from overwinter.device.swap import elbow as elbow_of
    from overwinter.profiling.links import SIZES, link_times
    from overwinter.profiling.machine import fingerprint
    from overwinter.store.elbows import Elbow, put_elbow

    config = DeviceConfig(name=DeviceId("measured"), memory_bytes=SIZES[-1], bytes_per_s=float(device_bandwidth))
    times = link_times(config)
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

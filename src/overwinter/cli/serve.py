"""The command that starts a node. The options of its configuration are generated from the fields of NodeConfig."""

import os
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from overwinter.cli.devices import device_options, devices_of, policy_of
from overwinter.cli.log_format import LogFormat, log, logging_to_stderr
from overwinter.cli.options import as_json, byte_size, print_json, size_text
from overwinter.core.bounds import Bounds
from overwinter.core.config import (
    NODE_BOUNDS,
    REQUEST_BOUNDS,
    SCHEDULER_BOUNDS,
    NodeConfig,
    RequestLimits,
    SchedulerConfig,
)
from overwinter.core.devices import DeviceIsolation
from overwinter.core.policies import POLICIES

HELP = {
    "host": "Address to listen on. Any address but loopback needs tokens or --insecure.",
    "port": "Port to listen on; 0 chooses a free port.",
    "drain_s": "Seconds that a stopping node may take to answer its open requests.",
    "data": "Directory of the repository, which stores everything deployed.",
    "host_store": "Directory on a tmpfs for the blocks of loaded functions.",
    "keep_warm": "Keep the blocks in memory after a clean stop, for the next start.",
    "requests_bytes_max": "Memory limit of all requests together. [default: an eighth of the available memory]",
    "caller_share": "Share of that memory that one caller (a token's tenant, or without tokens an address) may use.",
    "request_bytes_max": "Largest body of an inference request, also after decompression.",
    "json_bytes_max": "Largest JSON of a request or a reply. Larger tensors must use the binary extension.",
    "elements_max": "Most elements of BYTES tensors in one request.",
    "manifest_bytes_max": "Largest manifest of a function.",
    "block_bytes_max": "Largest block of a deploy.",
    "uploads_max": "Concurrent uploads of blocks.",
    "memory_wait_s": "Seconds that a large request waits for memory before it is refused.",
    "head_bytes_max": "Most bytes of a request's request line, headers and trailers.",
    "headers_max": "Most headers of a request.",
    "head_timeout_s": "Seconds within which the headers of a request must arrive.",
    "idle_timeout_s": "Seconds after which an idle connection is closed.",
    "stall_s": "Seconds over which the transfer rate of a request body or a reply is measured.",
    "rate_min_bytes": "Lowest transfer rate of a request body or a reply, in bytes per second.",
    "connections_max": "Most open connections.",
    "memory_free_min_bytes": "Memory to keep free. Below it, unused blocks are evicted and idle workers are stopped.",
    "functions_max": "Most deployed versions of all functions.",
    "tenant_functions_max": "Most deployed versions of one tenant.",
    "tenant_deploys_max": "Most concurrent deploys of one tenant.",
    "pipelines_max": "Most deployed pipelines; one tenant may have half of them.",
    "manifests_bytes_max": "Most bytes of the manifests of all functions; one tenant may have half.",
    "verify_share": "Share of one core that verifies blocks in memory. 0: only those of an earlier run of the node.",
    "disk_free_min_bytes": "Disk space to keep free. A deploy that would leave less is refused.",
    "tenant_disk_bytes": "Disk limit for the blocks of one tenant, for example 8GiB. [default: none]",
    "unneeded_keep_s": "Seconds that blocks without a function stay on disk.",
    "journal": "File to which the journal of the scheduler is written; a previous one is renamed.",
    "journal_ring": "Steps of the scheduler kept in memory.",
    "profile_on_deploy": "Profile new programs in the background, while no request runs.",
    "accounting_s": "Seconds between two comparisons of the accounted memory with the kernel's figures.",
    "profile_share": "Share of the time that profiling may take while the node serves.",
    "policy": "Set of scheduling policies: Overwinter's, a paper's, or a baseline.",
    "cores": "Cores for all workers. [default: all cores]",
    "memory_bytes": "Limit of the private memory of all workers, such as 8GiB. [default: half of the available memory]",
    "host_bytes": "Memory limit for the blocks of loaded functions. [default: 95% of what the tmpfs has for them]",
    "host_keep_alive_s": "Seconds without use after which the blocks of a function leave the host store.",
    "workers_max": "Most worker processes. [default: as many as the system's limits allow]",
    "tenant_workers_max": "Most worker processes of one tenant. [default: all, or 15/16 if there are other tenants]",
    "runs_max": "Most concurrent runs of all workers. [default: as many as the system's limits allow]",
    "workers_ahead": "Processes forked ahead, at most 2 per tenant. [default: 8, fewer with little memory]",
    "requests_max": "Most open requests; those of one tenant may be at most as many as are still free.",
    "attempts_max": "Most attempts of a request whose worker dies.",
    "start_timeout_s": "Seconds that a worker may take to start.",
    "stop_timeout_s": "Seconds that a worker may take to stop before it is killed.",
    "drain_timeout_s": "Seconds for a run to end after its function is removed, or others need its worker or device.",
    "warm_up_max_s": "Longest run of a program that is kept compiled, in seconds.",
    "prepared_max": "Most programs of a tenant that are kept compiled for faster wakes.",
    "zygotes_max": "Most tenants whose programs are kept compiled.",
    "zygote_timeout_s": "Seconds within which a zygote must answer or fork; otherwise it is replaced.",
    "warm_up_timeout_s": "Seconds that compiling a program in advance may take.",
    "imports": "Modules that handlers use, for example numpy,scipy.signal. They are imported once, not at each wake.",
    "device_isolation": "Who uses a device at one time. none: all tenants. tenant: one tenant. function: one function.",
    "backoff_first_s": "Seconds before a function that failed to start is tried again.",
    "backoff_max_s": "Most seconds between two such attempts.",
    "retry_after_min_s": "Lowest Retry-After of a refusal by the scheduler, in seconds.",
}
"""The help text of each field of the configuration."""

STRUCTS: dict[str, type[msgspec.Struct]] = {"scheduler": SchedulerConfig, "requests": RequestLimits}
"""The fields of the configuration that are structs."""
DEFAULTS = {"data": "~/.local/share/overwinter"}
# Only a simulation knows the rates that `oracle` expects.
POLICY_NAMES = sorted(name for name, policy in POLICIES.items() if policy.rate != "oracle")
CHOICES = {"policy": POLICY_NAMES, "device_isolation": get_args(DeviceIsolation)}
SHARES = ("profile_share", "caller_share", "verify_share")
BOUNDS: Bounds = {**SCHEDULER_BOUNDS, **NODE_BOUNDS, **REQUEST_BOUNDS}
PATHS = ("data", "host_store", "journal")
LARGEST_PORT = 65535


def config_options() -> list[click.Option]:
    """Create one option for each field of NodeConfig and of its structs, and those that describe its devices."""
    fields = [field for field in msgspec.structs.fields(NodeConfig) if field.name not in STRUCTS]
    fields += [field for kind in STRUCTS.values() for field in msgspec.structs.fields(kind)]
    return [*(_option(field) for field in fields if field.name != "devices"), *device_options()]


def config_of(values: dict[str, Any]) -> NodeConfig:
    """Build the configuration from the options that `config_options` made."""
    values["devices"] = devices_of(values)
    values["policy"] = policy_of(values)
    within: dict[str, Any] = {
        name: kind(**{field.name: values.pop(field.name) for field in msgspec.structs.fields(kind)})
        for name, kind in STRUCTS.items()
    }
    for name in PATHS:
        if values[name] is not None:
            values[name] = str(Path(values[name]).expanduser().absolute())
    return NodeConfig(**values, **within)


def _option(field: msgspec.structs.FieldInfo) -> click.Option:
    flag = "--" + field.name.replace("_", "-")
    default: Any = DEFAULTS[field.name] if field.required else field.default
    kind: Any = str
    metavar = "PATH" if field.name in PATHS else "NAMES" if field.name == "imports" else "ADDRESS"
    if field.name in CHOICES:
        kind = click.Choice(CHOICES[field.name])
        return click.Option([flag], type=kind, default=default, help=HELP[field.name])
    if field.type is bool:
        both = f"{flag}/--no-{flag[2:]}"
        return click.Option([both], default=default, help=HELP[field.name])
    if "bytes" in field.name:
        kind, metavar = byte_size, "SIZE"
        default = None if default is None else size_text(default).replace(" ", "")
    elif field.name == "port":
        kind, metavar = click.IntRange(0, LARGEST_PORT), "PORT"
    elif field.type in (int, int | None):
        kind, metavar = click.IntRange(int(BOUNDS[field.name].least)), "NUMBER"
    elif field.name in SHARES:
        kind, metavar = click.FloatRange(BOUNDS[field.name].least, 1), "SHARE"
    elif field.type in (float, float | None):
        kind, metavar = click.FloatRange(BOUNDS[field.name].least), "SECONDS"
    option = _PortOption if field.name == "port" else click.Option
    return option([flag], type=kind, metavar=metavar, default=default, help=HELP[field.name])


class _PortOption(click.Option):
    """The option --port. In a pod of Kubernetes its variable may be that of a Service named `overwinter`."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        found = super().resolve_envvar_value(ctx)
        return None if found is not None and "://" in found else found


@click.command(
    params=config_options(),
    # The variables are named OVERWINTER_PORT, not OVERWINTER_SERVE_PORT.
    context_settings={"auto_envvar_prefix": "OVERWINTER"},
    epilog="Every option but --json can be set by a variable: --host-bytes by OVERWINTER_HOST_BYTES, and so on.",
)
@click.option("--port-file", type=click.Path(dir_okay=False, path_type=Path), help="File to which the port is written.")
@click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="text",
    help="Format of the log on standard error: text, or one JSON object per line.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond loopback even without tokens.")
@as_json
def serve(port_file: Path | None, log_format: LogFormat, insecure: bool, as_json: bool, **values: Any) -> None:
    """Run a node until it is interrupted or terminated."""
    from overwinter.server import open_listener, run

    with logging_to_stderr(log_format):
        config = _checked_config(values, insecure, log_format)
        with open_listener(config.host, config.port) as listener:
            port: int = listener.getsockname()[1]
            run(
                config,
                listener,
                log,
                partial(_announce_ready, config, port, port_file, "stdout" if as_json else log_format),
            )


def _checked_config(values: dict[str, Any], insecure: bool, log_format: LogFormat) -> NodeConfig:
    """Return the configuration. Raises UsageError if it is invalid, or if the node would listen beyond loopback without
    tokens and `insecure` is not set.
    """
    from overwinter.api.sites import is_loopback
    from overwinter.store.tokens import TokenFile

    try:
        config = config_of(values)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if is_loopback(config.host) or TokenFile(Path(config.data)).read().required:
        return config
    everyone = (
        "whoever reaches this address can run every function, deploy, replace, load, unload, measure and remove "
        "functions and pipelines under any tenant's name, and read metrics and usage of all"
    )
    if not insecure:
        raise click.UsageError(
            f"--host {config.host}: without tokens {everyone}. Make one first (overwinter token create --data "
            f"{config.data}), or pass --insecure"
        )
    warning = f"listening on {config.host} without tokens: {everyone}"
    log(warning if log_format == "json" else f"warning: {warning}")
    return config


def _announce_ready(config: NodeConfig, port: int, port_file: Path | None, output: str) -> None:
    """Write the port file, if any, and announce that the node is ready: as JSON, in the log or on the terminal."""
    if port_file is not None:
        write_port(port_file, port)
    url = f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{config.host}:{port}"
    if output == "stdout":
        print_json({"url": url, "port": port, "data": config.data, "pid": os.getpid()})
    elif output == "json":
        log(f"overwinter is ready at {url}", level="info")
    else:
        click.echo(f"overwinter is ready at {url}")


def write_port(path: Path, port: int) -> None:
    """Write the port atomically, so that a script that waits for the file never reads a part of it."""
    if path.exists() and not path.is_file():
        # A device or a pipe is not replaced.
        path.write_text(f"{port}\n")
        return
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)

"""The command that starts a node. Its options are generated from the fields of NodeConfig, so the two cannot differ."""

import os
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from overwinter.cli.log_format import LogFormat, log, logging_to_stderr
from overwinter.cli.options import as_json, byte_size, print_json, size_text
from overwinter.core.config import NodeConfig, RequestLimits, SchedulerConfig
from overwinter.core.policies import POLICIES

HELP = {
    "host": "Address to listen on. Anything but loopback opens the node to others, and needs tokens or --insecure.",
    "port": "Port to listen on; 0 takes a free one.",
    "drain_s": "Seconds for which a node that stops goes on answering the requests that it has.",
    "data": "Directory of the repository: what is deployed lives here.",
    "host_store": "The tmpfs under which the blocks of warm functions lie.",
    "keep_warm": "Leave the blocks in memory after a clean stop, for the next start.",
    "requests_bytes_max": "Memory that all requests together may hold; without it, an eighth of what is there.",
    "client_share": "Of that memory, of connections and of uploads, what one caller's address may hold.",
    "request_bytes_max": "Largest body of a request, and what a compressed one may become.",
    "json_bytes_max": "Most JSON in a request or an answer; larger tensors travel as binary.",
    "elements_max": "Most elements of BYTES tensors in a request.",
    "manifest_bytes_max": "Largest manifest of a function or a pipeline.",
    "block_bytes_max": "Largest block of a deploy.",
    "uploads_max": "Blocks on their way in at once.",
    "room_wait_s": "Seconds that a large request waits for memory before it is refused.",
    "head_bytes_max": "Most bytes of a request's line, headers and trailers.",
    "headers_max": "Most headers of a request.",
    "head_timeout_s": "Seconds in which the headers of a request must have come.",
    "idle_timeout_s": "Seconds after which a connection without a request is closed.",
    "stall_s": "Seconds over which the least rate of a body or an answer is measured.",
    "rate_min_bytes": "Least bytes a second of a body that is sent or an answer that is read.",
    "connections_max": "Connections open at once.",
    "memory_free_min_bytes": "Memory to keep free: with less, unused blocks and idle workers go.",
    "functions_max": "Versions of functions deployed at once.",
    "tenant_functions_max": "Of these, what one tenant may have.",
    "tenant_deploys_max": "Deploys of one tenant under way at once.",
    "pipelines_max": "Pipelines deployed at once; one tenant may have half of them.",
    "manifests_bytes_max": "Bytes of all functions' manifests together; one tenant may have half.",
    "verify_share": "Share of one core that looks for changed bits in the blocks in memory; 0: none.",
    "disk_free_min_bytes": "Disk to keep free: a deploy that would leave less is refused.",
    "tenant_disk_bytes": "Most disk for the blocks of one tenant, as 8GiB; without it, any.",
    "unneeded_keep_s": "Seconds for which blocks that no function needs stay on disk.",
    "journal": "File to which every step of the scheduler is appended.",
    "journal_ring": "Steps of the scheduler kept in memory.",
    "profile_on_deploy": "Measure each new program in the background, while no request is under way.",
    "accounting_s": "Seconds between two comparisons of the bytes that are counted with the kernel's.",
    "profile_share": "Share of the time that measuring may take while the node serves.",
    "policy": "The rules by which it decides: Overwinter's own, a paper's, or a baseline's.",
    "cores": "Cores for all workers; without it, what the machine has.",
    "memory_bytes": "Most private memory of all workers, as 8GiB; without it, half of what is there.",
    "host_bytes": "Most memory for the blocks of warm functions, as 8GiB; without it, what the tmpfs has.",
    "host_keep_alive_s": "Seconds after which the blocks of a function that nobody uses leave the host store.",
    "workers_max": "Worker processes alive at once; without it, what the system's limits allow.",
    "tenant_workers_max": "Worker processes of one tenant; without it, a sixteenth is kept for others.",
    "runs_max": "Runs that all workers alive may have at once; without it, what the system's limits allow.",
    "workers_ahead": "Processes forked before a request needs them, at most 2 a tenant; without it, 8.",
    "requests_max": "Requests without an answer; one tenant may have as many as places are left.",
    "attempts_max": "Times a request may be tried when its worker dies.",
    "start_timeout_s": "Seconds that a worker may take to start.",
    "stop_timeout_s": "Seconds that a worker may take to stop before it is killed.",
    "drain_timeout_s": "Seconds that a run may go on when its function is removed or others need its worker.",
    "warm_up_max_s": "Longest run of a program that is held compiled.",
    "prepared_max": "Programs of a tenant held compiled, ready for a wake.",
    "zygotes_max": "Tenants whose programs are held compiled at once.",
    "zygote_timeout_s": "Seconds in which a zygote must answer or fork before it is replaced.",
    "warm_up_timeout_s": "Seconds that compiling a program ahead may take.",
    "imports": "Modules that handlers use, as numpy,scipy.signal: imported once, not at each wake.",
    "backoff_first_s": "Seconds before a function that failed to start is tried again.",
    "backoff_max_s": "Most seconds between such tries.",
    "retry_after_min_s": "Least seconds that a refused caller is asked to wait.",
}
"""What each field of the configuration means to whoever starts a node."""

WITHIN: dict[str, type[msgspec.Struct]] = {"scheduler": SchedulerConfig, "requests": RequestLimits}
"""Fields of the configuration that are structs of their own."""
DEFAULTS = {"data": "~/.local/share/overwinter"}
SHARES = ("profile_share", "client_share", "verify_share")
MAY_BE_NONE = ("verify_share", "workers_ahead")
PATHS = ("data", "host_store", "journal")
LARGEST_PORT = 65535


def configured() -> list[click.Option]:
    """One option for each field of NodeConfig, and of the structs within it."""
    fields = [field for field in msgspec.structs.fields(NodeConfig) if field.name not in WITHIN]
    fields += [field for kind in WITHIN.values() for field in msgspec.structs.fields(kind)]
    return [_option(field) for field in fields]


def config_of(values: dict[str, Any]) -> NodeConfig:
    """The configuration that the options of `configured` describe."""
    within: dict[str, Any] = {
        name: kind(**{field.name: values.pop(field.name) for field in msgspec.structs.fields(kind)})
        for name, kind in WITHIN.items()
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
    if field.name == "policy":
        kind = click.Choice(sorted(POLICIES))
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
        kind, metavar = click.IntRange(0 if field.name in MAY_BE_NONE else 1), "NUMBER"
    elif field.name in SHARES:
        kind, metavar = click.FloatRange(0, 1, min_open=field.name not in MAY_BE_NONE), "SHARE"
    elif field.type in (float, float | None):
        kind, metavar = click.FloatRange(0, min_open=True), "SECONDS"
    return click.Option([flag], type=kind, metavar=metavar, default=default, help=HELP[field.name])


@click.command(
    params=configured(),
    # Not OVERWINTER_SERVE_PORT: a node's settings have the short names.
    context_settings={"auto_envvar_prefix": "OVERWINTER"},
    epilog="Every option can also come from the environment: --host-bytes as OVERWINTER_HOST_BYTES, and so on.",
)
@click.option("--port-file", type=click.Path(dir_okay=False, path_type=Path), help="File to write the port to.")
@click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="text",
    help="How the log on the standard error looks: as text, or as one JSON object a line.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond loopback also while there is no token.")
@as_json
def serve(port_file: Path | None, log_format: LogFormat, insecure: bool, as_json: bool, **values: Any) -> None:
    """Run a node until it is interrupted or terminated."""
    from overwinter.wiring import bind, run

    with logging_to_stderr(log_format):
        config = _allowed(values, insecure, log_format)
        with bind(config.host, config.port) as listener:
            port: int = listener.getsockname()[1]
            run(config, listener, log, partial(_tell, config, port, port_file, "answer" if as_json else log_format))


def _allowed(values: dict[str, Any], insecure: bool, log_format: LogFormat) -> NodeConfig:
    """The configuration; UsageError where it is none, or would let in anybody who was not asked to."""
    from overwinter.store.tokens import TokenFile

    try:
        config = config_of(values)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if is_loopback(config.host) or TokenFile(Path(config.data)).read().asked:
        return config
    anybody = (
        "whoever reaches this address can run every function, deploy, replace, load, unload, measure and remove "
        "functions and pipelines under any tenant's name, and read metrics and usage of all"
    )
    if not insecure:
        raise click.UsageError(
            f"--host {config.host}: without tokens {anybody}. Make one first (overwinter token create --data "
            f"{config.data}), or say --insecure"
        )
    warning = f"listening on {config.host} without tokens: {anybody}"
    log(warning if log_format == "json" else f"warning: {warning}")
    return config


def _tell(config: NodeConfig, port: int, port_file: Path | None, how: str) -> None:
    """The node is ready: say so to the script, the program, the log or the person that started it."""
    if port_file is not None:
        write_port(port_file, port)
    url = f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{config.host}:{port}"
    if how == "answer":
        print_json({"url": url, "port": port, "data": config.data, "pid": os.getpid()})
    elif how == "json":
        log(f"overwinter is ready at {url}", level="info")
    else:
        click.echo(f"overwinter is ready at {url}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def write_port(path: Path, port: int) -> None:
    """Write the port in one step: a script that waits for the file never reads half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)

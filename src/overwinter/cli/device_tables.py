"""The tables of the devices of the pool."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from overwinter.cli.fitting import Column, FittedTable
from overwinter.cli.options import size_text
from overwinter.cli.tables import Description, facts_table


def devices_table(devices: Sequence[Description]) -> FittedTable:
    """Build a table with one row for each device."""
    return FittedTable(_DEVICES, [_row(each) for each in devices])


def _row(device: Description) -> tuple[str, ...]:
    history, run, functions = device["history"] or {}, device["run"], device["functions"]
    return (
        device["name"],
        device["kind"],
        device["state"] or "-",
        device["tenant"] or "-",
        _size_text(device["taken_bytes"]),
        size_text(device["total_bytes"]),
        _size_text(device["shared_bytes"]),
        str(len(functions)),
        _count_text(history.get("runs")),
        _share_text(history.get("hit_ratio")),
        _size_text(history.get("moved_bytes")),
        _size_text(history.get("peer_bytes")),
        _count_text(history.get("executors")),
        _count_text(history.get("crashes")),
        "-" if run is None else run["function"],
    )


_DEVICES = (
    Column("DEVICE", "word"),
    Column("KIND", "word", 2),
    Column("STATE", "word"),
    Column("TENANT", "name", 7),
    Column("TAKEN"),
    Column("OF"),
    Column("SHARED", drop_order=5),
    Column("FUNCTIONS", drop_order=8),
    Column("RUNS", drop_order=6),
    Column("HITS", drop_order=10),
    Column("MOVED", drop_order=9),
    Column("FROM PEERS", drop_order=2),
    Column("STARTS", drop_order=1),
    Column("CRASHES", drop_order=3),
    Column("RUNNING", "name"),
)


def described_devices(devices: Sequence[Description]) -> Iterator[RenderableType]:
    """Build what `overwinter devices` shows: the devices, the functions whose blocks they hold, their links, and
    failures.
    """
    yield devices_table(devices)
    rows = [
        (
            device["name"],
            _resident_text(each),
            each["tenant"] or "-",
            size_text(each["nbytes"]),
            _size_text(each["exclusive_bytes"]),
        )
        for device in devices
        for each in device["functions"]
    ]
    if rows:
        yield Text()
        yield FittedTable(_RESIDENTS, rows)
    yield Text()
    yield facts_table({fact: text for device in devices for fact, text in _facts(device)})


_RESIDENTS = (
    Column("DEVICE", "word"),
    Column("FUNCTION", "name"),
    Column("TENANT", "name", 1),
    Column("BYTES"),
    Column("EXCLUSIVE"),
)


def _facts(device: Description) -> Iterator[tuple[str, str]]:
    name, links, run = device["name"], device["links"], device["run"]
    host = f"{_rate_text(links['bytes_per_s'])} from the host, latency {links['latency_s'] * 1e6:.0f} us"
    switch = f", behind {links['switch']} with {_rate_text(links['switch_bytes_per_s'])}" if links["switch"] else ""
    peers = "".join(f", {_rate_text(rate)} from {peer}" for peer, rate in links["peers"].items())
    yield f"{name} links", f"{host}{switch}{peers}, in groups of {size_text(links['group_bytes'])}"
    if run is not None:
        requests = "1 request" if run["requests"] == 1 else f"{run['requests']} requests"
        brought = f", {size_text(run['missing_bytes'])} missing at its start" if run["missing_bytes"] else ""
        yield f"{name} running", f"{run['function']}, {requests}, for {run['seconds']:.2f} s so far{brought}"
    if device["failures"]:
        yield f"{name} failed", _failure_text(device)


def out_of_service(devices: Sequence[Description]) -> list[str]:
    """Return a line for each device that is out of service."""
    out = [each for each in devices if each["state"] == "out"]
    return [f"device {each['name']} is out of service; it failed {_failure_text(each)}" for each in out]


def _failure_text(device: Description) -> str:
    retry = f"; next attempt in {device['backoff_s']:.1f} s" if device["backoff_s"] else ""
    times = "once" if device["failures"] == 1 else f"{device['failures']} times in a row"
    return f"{times}: {device['fault']}{retry}"


def _resident_text(resident: Description) -> str:
    number, function = resident.get("slice"), resident["function"]
    return function if number is None else f"{function} (slice {number})"


def _rate_text(bytes_per_s: float) -> str:
    return f"{size_text(bytes_per_s)}/s"


def _size_text(nbytes: int | None) -> str:
    return "-" if nbytes is None else size_text(nbytes)


def _count_text(count: int | None) -> str:
    return "-" if count is None else str(count)


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"

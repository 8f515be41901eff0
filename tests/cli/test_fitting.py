"""Tables on narrow terminals: columns are omitted, names are wrapped, and no number is cut."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from overwinter.cli.device_tables import described_devices, devices_table
from overwinter.cli.list_tables import functions_table, pipelines_table
from overwinter.cli.telemetry_tables import activity_table, rows_for, usage_table
from tests.cli.conftest import Run, Serving

NAME = "a-model-of-our-shop.with-a-long-name_" + "x" * 40
MANY = {
    "name": NAME, "tenant": "t", "state": "UNAVAILABLE", "running": 12_345, "queued": 98_765, "shared": 0.98765,
    "rate": 123_456.7, "family": f"{NAME}@1234", "members": 1234,
    "workers": list(range(100_000, 100_064)), "p50_ms": 123_456.0, "p99_ms": 987_654.0, "attainment": 0.99999,
    "slo_ms": 123_456.0, "host_bytes": 1023 << 30,
    "exclusive_bytes": 1022 << 30, "private_bytes": 1021 << 30, "wakes": 1_234_567, "requests": 12_345_678_901,
    "refused": 9_876_543_210,
}  # fmt: skip
FEW = {
    **MANY, "name": "f", "state": "awake", "family": "f@1", "members": 1, "workers": [1], "running": 0, "queued": 0,
    "shared": None, "rate": 0.0, "p50_ms": None, "p99_ms": 1.0, "attainment": None, "slo_ms": None, "host_bytes": 0,
    "exclusive_bytes": 0, "private_bytes": 0, "wakes": 0, "requests": 0, "refused": 0,
}  # fmt: skip
ACTIVITY = {
    "cores": 128, "cores_running": 128, "worker_states": {"idle": 10_000, "busy": 128, "starting": 1000},
    "versions_deployed": 20_000, "running": 123_456, "queued": 1_234_567, "host_bytes": 1 << 40,
    "host_budget": 2 << 40, "private_bytes": 1 << 40, "private_budget": 2 << 40, "functions": [MANY, FEW],
}  # fmt: skip
LISTED = {
    "name": NAME, "version": 1234, "traffic": 10, "promoted": True, "tenant": "t", "state": "UNAVAILABLE",
    "lifecycle": "unloaded",
    "family": f"{NAME}@1234", "members": 1234, "workers": MANY["workers"], "waiting": 98_765, "nbytes": 1023 << 30,
    "missing_bytes": 1022 << 30, "settings": {"slo_ms": 123_456.0}, "created": 0.0,
}  # fmt: skip
PIPELINE = {
    "name": NAME, "version": 1234, "state": "UNAVAILABLE", "settings": {"slo_ms": 123_456.0}, "created": 0.0,
    "requests": {"running": 12_345, "answered": 12_345_678_901, "in_slo": 11_345_678_901, "failed": 9_876_543_210},
    "stages": {f"s{number}": {"function": f"{NAME}{number}"} for number in range(4)},
}  # fmt: skip
USED = {
    "tenant": "a-tenant-" + "t" * 40, "function": NAME, "family": f"{NAME}@1234", "since": "2025-01-02",
    "requests": 12_345_678_901, "core_ms": 9.87e12, "idle_core_ms": 8.76e12, "billed_core_ms": 1.23e13,
    "disk_byte_s": 3600.0 * (1023 << 40), "host_byte_s": 3600.0 * (1022 << 40), "private_byte_s": 3600.0 * (1021 << 40),
}  # fmt: skip
DEVICE = {
    "name": "virtual:12", "kind": "virtual", "state": "stopping", "executor": 123_456, "tenant": USED["tenant"],
    "taken_bytes": 1022 << 30, "total_bytes": 1023 << 30, "shared_bytes": 1021 << 30,
    "functions": [
        {"function": f"{NAME}@1234", "tenant": USED["tenant"], "nbytes": 1020 << 30, "exclusive_bytes": 1019 << 30}
    ],
    "run": {"function": NAME, "tenant": "t", "requests": 123, "missing_bytes": 1 << 30, "seconds": 1.5},
    "failures": 3, "fault": "the executor was killed", "backoff_s": 12.5,
    "links": {
        "bytes_per_s": 12e9, "latency_s": 2e-5, "switch": "s0", "switch_bytes_per_s": 24e9,
        "peers": {"virtual:1": 25e9}, "group_bytes": 2 << 20,
    },
    "history": {
        "runs": 12_345_678, "run_s": 1e6, "hits": 1, "misses": 2, "hit_ratio": 0.98765, "moved_bytes": 1023 << 40,
        "executors": 1234, "crashes": 123,
    },
}  # fmt: skip
IDLE = {**DEVICE, "name": "virtual:1", "tenant": None, "functions": [], "run": None, "failures": 0, "history": None}
USED_DEVICES = {
    "device_ms": 9.87e12, "idle_ms": 8.76e12, "billed_ms": 1.23e13, "moved_bytes": 1023 << 40,
    "device_byte_s": 3600.0 * (1023 << 40),
}  # fmt: skip
POOLED = {"workers": [], "devices": ["virtual:0", "virtual:12"]}
TABLES = {
    "top": activity_table(ACTIVITY, None),
    "ps": functions_table([LISTED, {**LISTED, "name": "f", "members": 1, "workers": []}], 86_400 * 123.0),
    "pipelines": pipelines_table([PIPELINE], 86_400 * 123.0),
    "usage": usage_table([USED, {**USED, "tenant": "t", "function": "f"}]),
    "devices": devices_table([DEVICE, IDLE]),
    "ps with devices": functions_table(
        [{**LISTED, **POOLED, "settings": {"slo_ms": 80.0, "device": "pool"}}], 86_400 * 123.0
    ),
    "usage with devices": usage_table([{**USED, "device": USED_DEVICES}, {**USED, "function": "f", "device": None}]),
}
STAY = {
    "top": ["FUNCTION", "STATE", "QUEUE", "P99"],
    "ps": ["NAME", "VERSION", "STATE"],
    "pipelines": ["PIPELINE", "VERSION", "STATE", "ANSWERED", "FAILED"],
    "usage": ["FUNCTION", "REQUESTS", "BILLED"],
    "devices": ["DEVICE", "STATE", "TAKEN", "OF", "RUNNING"],
    "ps with devices": ["NAME", "VERSION", "STATE"],
    "usage with devices": ["FUNCTION", "REQUESTS", "BILLED", "DEVICE BILLED"],
}


def shown(name: str, width: int) -> list[str]:
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(TABLES[name])
    return captured.get().splitlines()


def cells(lines: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return the titles of a table and the cells of each line below."""
    rule = next(number for number, line in enumerate(lines) if "─" in line)
    titles, *rows = (re.split(" {2,}", line.strip()) for line in [lines[rule - 1], *lines[rule + 1 :]] if line.strip())
    return titles, rows


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_cut(name: str, width: int) -> None:
    lines, (all_titles, whole) = shown(name, width), cells(shown(name, 2000))
    titles, rows = cells(lines)
    assert max(map(len, lines)) <= width
    assert set(STAY[name]) <= set(titles) <= set(all_titles)
    # A cell is shown whole, or as a part of a name.
    known = {cell for row in whole for cell in row}
    names = [NAME, USED["tenant"], whole[0][all_titles.index("FUNCTIONS")] if "FUNCTIONS" in all_titles else ""]
    pieces = [cell for row in rows for cell in row if cell not in known]
    assert [piece for piece in pieces if not any(piece in each for each in names)] == []
    assert len(rows[0]) == len(titles)
    result = 0
    for cell in (cell for row in rows for cell in row):
        result += len(cell) if NAME.startswith(cell, result) else 0
    assert result == len(NAME)
    if name == "top":
        above = " ".join(" ".join(lines[: lines.index("")]).split())
        assert above == " ".join(" ".join(shown(name, 2000)[:2]).split())


@pytest.mark.parametrize("width", [80, 120, 160])
def test_top_has_a_line_for_each_device_and_cuts_nothing(width: int) -> None:
    def rendered(seen: dict, width: int) -> list[str]:
        console = Console(width=width, markup=False, highlight=False, emoji=False)
        with console.capture() as captured:
            console.print(activity_table(seen, None))
        return captured.get().splitlines()

    function = {**FEW, "device": "pool", "devices": ["virtual:12"], "workers": []}
    lines = rendered({**ACTIVITY, "functions": [function], "devices": [DEVICE, IDLE]}, width)
    without = rendered({**ACTIVITY, "functions": [function], "devices": []}, width)
    start = lines.index("")
    devices = lines[start + 1 : start + 1 + len(lines) - len(without)]
    assert max(map(len, lines)) <= width
    assert lines[: start + 1] + lines[start + 1 + len(devices) :] == without
    titles, rows = cells(devices)
    whole = cells(shown("devices", 2000))
    assert {"DEVICE", "STATE", "TAKEN", "OF", "RUNNING"} <= set(titles) <= set(whole[0])
    known = {cell for row in whole[1] for cell in row}
    names = (NAME, USED["tenant"])
    assert [cell for row in rows for cell in row if cell not in known and not any(cell in name for name in names)] == []
    assert [row[0] for row in rows if row[0].startswith("virtual")] == ["virtual:12", "virtual:1"]
    assert ("pool: virtual:12" in "".join(lines)) == (width == 160)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_description_of_devices_cuts_nothing(width: int) -> None:
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        for part in described_devices([DEVICE, IDLE]):
            console.print(part)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for each in ("22.4 GiB/s", "behind s0", "23.3 GiB/s from virtual:1", "2.0 MiB", "123 requests", "3 times in a row"):
        assert each in words
    assert all(each in words for each in ("1020.0 GiB", "1019.0 GiB", "killed; next attempt in 12.5 s"))
    assert "…" not in text


@pytest.mark.parametrize("name", TABLES)
def test_a_wider_terminal_shows_more_columns(name: str) -> None:
    titles = [{word for line in shown(name, width) for word in line.split() if word.isupper()} for width in (80, 2000)]
    assert titles[0] < titles[1]


def test_nothing_is_left_out_that_there_is_room_for() -> None:
    small = {
        **LISTED, "name": "f", "members": 1, "workers": [], "version": 1, "traffic": 100, "promoted": False,
        "state": "READY",
        "waiting": 0, "nbytes": 1 << 20, "missing_bytes": 0, "settings": {"slo_ms": 80.0},
    }  # fmt: skip
    for width, whole in ((110, True), (80, False)):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(functions_table([small], 60.0))
        assert ("FAMILY" in captured.get()) == whole


@pytest.mark.parametrize("width", [80, 2000])
def test_top_shows_about_as_many_functions_as_there_is_room_for(width: int) -> None:
    many = {**ACTIVITY, "functions": [MANY, FEW] * 30}
    console = Console(width=width, height=24)
    rows = rows_for(many, console)
    assert len(console.render_lines(activity_table(many, rows))) < console.height
    assert len(console.render_lines(activity_table(many, rows + 4))) >= console.height
    assert rows_for(ACTIVITY, console) == 2


def on_terminal(width: int, *arguments: str) -> list[str]:
    """Return the output of a command on a terminal of this width."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-m", "overwinter", *arguments]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(terminal)
        shown = b""
        # At the end of the output the terminal raises an error, and `_read` returns nothing.
        while piece := _read(screen):
            shown += piece
    os.close(screen)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize("command", [("ps",), ("usage",), ("top", "--once")], ids=lambda command: command[0])
def test_what_a_node_tells_fits_a_real_terminal(node: Serving, run: Run, scale: str, command: tuple[str, ...]) -> None:
    lines = on_terminal(80, *command, "--url", node.url)
    titles = [len(re.findall("[A-Z0-9/]+", line)) for line in lines if "FUNCTION" in line or "NAME" in line]
    wide = run(*command).stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(scale in line for line in lines)
    assert not any("…" in line for line in lines)
    assert max(titles) < max(
        len(re.findall("[A-Z0-9/]+", line)) for line in wide if "FUNCTION" in line or "NAME" in line
    )

"""The tables of activity, explanations and usage."""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from overwinter.cli.device_tables import devices_table
from overwinter.cli.fitting import Column, FittedTable
from overwinter.cli.options import size_text
from overwinter.cli.tables import (
    Description,
    facts_table,
    family_text,
    locations_text,
    members_text,
    plain_table,
    slo_text,
    traffic_text,
)
from overwinter.core.profile import Configuration
from overwinter.scheduler.latency import SLOWDOWN_MAX

SHOWN_MAX = 5
"""How many of the functions that share runs with a function are named, at most."""


def activity_table(activity: Description, limit: int | None) -> RenderableType:
    """Build a summary of the node in two lines, and a row for each device and each of at most `limit` functions."""
    shown = activity["functions"][:limit]
    rows = [
        (
            each["name"],
            each["state"],
            family_text(each),
            locations_text(each, each.get("device")),
            str(each["running"]),
            str(each["queued"]),
            _share_text(each["shared"]),
            f"{each['rate']:.1f}",
            _ms_text(each["p50_ms"]),
            _ms_text(each["p99_ms"]),
            slo_text(each["slo_ms"]),
            _share_text(each["attainment"]),
            size_text(each["host_bytes"]),
            _size_text(each["exclusive_bytes"]),
            size_text(each["private_bytes"]),
            str(each["wakes"]),
            str(each["requests"]),
            str(each["refused"]),
        )
        for each in shown
    ]
    more = len(activity["functions"]) - len(shown)
    rest = Text(f"and {more} more" if more else "")
    above: list[RenderableType] = [Text(_node_text(activity)), Text(_memory_text(activity)), Text()]
    if activity.get("devices"):
        above += [devices_table(activity["devices"]), Text()]
    return Group(*above, FittedTable(_ACTIVITY, rows), rest)


def rows_for(activity: Description, console: Console) -> int:
    """Return how many functions fit on a terminal; names and the summary may take several lines."""

    def lines(rows: int) -> int:
        return len(console.render_lines(activity_table(activity, rows)))

    most = min(console.height, len(activity["functions"]))
    return max(1, bisect_right(range(1, most + 1), console.height - 1, key=lines))


_ACTIVITY = (
    Column("FUNCTION", "name"),
    Column("STATE", "word"),
    Column("FAMILY", "word", 1),
    Column("WORKERS", "word", 5),
    Column("RUN", drop_order=11),
    Column("QUEUE"),
    Column("IN SHARED RUNS", drop_order=2),
    Column("RATE/S", drop_order=14),
    Column("P50", drop_order=10),
    Column("P99"),
    Column("SLO", drop_order=12),
    Column("MET", drop_order=13),
    Column("IN HOST", drop_order=7),
    Column("EXCLUSIVE", drop_order=3),
    Column("PRIVATE", drop_order=9),
    Column("WAKES", drop_order=4),
    Column("REQUESTS", drop_order=8),
    Column("REFUSED", drop_order=6),
)


def _node_text(activity: Description) -> str:
    states = ", ".join(f"{count} {state}" for state, count in sorted(activity["worker_states"].items())) or "none"
    # Only the administrator receives the figures of the whole node.
    running = activity["cores_running"]
    return (
        f"cores in use: {'-' if running is None else running} of {activity['cores']}   workers: {states}   requests: "
        f"{activity['running']} running, {activity['queued']} waiting   versions: {activity['versions_deployed']}"
    )


def _memory_text(activity: Description) -> str:
    budgets = {tier: activity[f"{tier}_budget"] for tier in ("host", "private")}
    of = {tier: "" if budget is None else f" of {size_text(budget)}" for tier, budget in budgets.items()}
    host, private = size_text(activity["host_bytes"]), size_text(activity["private_bytes"])
    return f"host store {host}{of['host']}   private memory of workers {private}{of['private']}"


def explained_tables(explained: Description) -> Iterator[RenderableType]:
    """Build a table for each aspect of a function about which something is known."""
    yield facts_table(_facts_of(explained))
    tiers = _titled("TIER", numbers=("RESIDENT", "MISSING", "EXCLUSIVE", "SHARED", "SHARED BY"))
    for tier in explained["tiers"]:
        name = f"{tier['tier']} ({tier['store']})" if tier["store"] else tier["tier"]
        sizes = (size_text(tier[key]) for key in ("resident", "missing", "exclusive", "shared"))
        tiers.add_row(name, *sizes, str(tier["sharers"]))
    yield tiers
    if explained["workers"]:
        yield FittedTable(_WORKERS, [_worker_row(worker) for worker in explained["workers"]])
        yield _bound_table(explained["workers"])
    for title, key in (("DECIDED", "decisions"), ("REFUSED", "refusals")):
        if explained[key]:
            yield _history_table(title, explained[key])


def _facts_of(explained: Description) -> dict[str, str]:
    settings, profile = explained["settings"], explained["profile"]
    state = explained["state"]
    if explained["backoff_s"] > 0:
        # A part of a function may back off while the function has another state.
        state += "" if state == "backoff" else ", in backoff"
        failures = explained["failures"]
        state += f" for {explained['backoff_s']:.1f} s after {failures} {'failure' if failures == 1 else 'failures'}"
    if explained["on_trial"]:
        state += ", on trial"
    slo = slo_text(settings["slo_ms"]) if settings["slo_ms"] is not None else "none"
    if explained["attainment"] is not None:
        slo += f", met by {_share_text(explained['attainment'])}"
    if explained["slo_infeasible"]:
        slo += "; no configuration meets it on this machine: the function is served as fast as possible"
    pool, run_s = explained.get("pool"), explained["run_s"]
    where = f"bound in {_count(_workers_that_have(explained), 'worker', 'workers')}"
    in_workers, seconds_of = pool is None or settings.get("device") == "any", "core"
    if pool is not None:
        on_devices = f"on {', '.join(pool['devices']) or 'no device'}"
        where = f"{where}, {on_devices}" if in_workers else on_devices
        run_s = (run_s if in_workers else None) or pool["run_s"] or None
        seconds_of = "core and device" if in_workers else "device"
    return {
        "function": f"{explained['name']}@{explained['version']}",
        "traffic": f"{traffic_text(explained)}; {explained['answered']} answered, {explained['refused']} refused",
        "tenant": explained["tenant"],
        **({"family": members_text(explained)} if in_workers else {}),
        "state": f"{state}, {where}, {explained['queued']} waiting",
        "SLO": slo,
        "rate": f"{explained['rate']:.2f} requests/s, {explained['expected_rate']:.2f} expected",
        "runs take": "not known" if run_s is None else _ms_text(run_s * 1000),
        "runs shared": _shared_text(explained["shared"], seconds_of),
        **({"last choice": explained["last_choice"]} if explained.get("last_choice") else {}),
        **({} if pool is None else _pool_facts(pool)),
        "profile": _unmeasured_text(explained) if profile is None else _profile_text(profile),
    }


def _pool_facts(pool: Description) -> dict[str, str]:
    """Return the devices on which a function of the pool ran, why the last one was chosen, and how many of its answers
    were in time, if its priority depends on that.
    """
    runs = ", ".join(f"{count} on {name}" for name, count in pool["runs"].items()) or "none"
    hits = "" if pool["hit_ratio"] is None else f"; {_share_text(pool['hit_ratio'])} found all blocks"
    moved = "" if pool["moved_bytes"] is None else f"; {size_text(pool['moved_bytes'])} moved"
    priority = {}
    if pool["answers"]:
        required = f"; {pool['required']:.0f} more in time are required to meet the SLO" if pool["required"] > 0 else ""
        priority = {"priority": f"{pool['in_time']} of the last {pool['answers']} answers were in time{required}"}
    last = {"last device": pool["last_device"] or "none"}
    if slices := pool.get("slices"):
        last = {f"slice {number}": _slice_text(each) for number, each in enumerate(slices, 1)}
    out = {"out of service": ", ".join(pool["out_of_service"])} if pool.get("out_of_service") else {}
    facts = {"runs on devices": f"{runs}{hits}{moved}", **out, **last, **priority}
    return {"cannot run": pool["no_device_reason"], **facts} if pool["no_device_reason"] else facts


def _slice_text(one: Description) -> str:
    """Format where a slice of a function's program lies, and its last device."""
    where = ", ".join(one["devices"]) or "no device"
    return f"{size_text(one['nbytes'])}, on {where}; last device: {one['last_device'] or 'none'}"


def _shared_text(shared: Description, of: str) -> str:
    """Format how often the function shared a run, at what cost, and with which functions; `of`: what it ran on, such as
    `core`, whose seconds are the cost.
    """
    if not shared["runs"]:
        return "none"
    names = list(shared["shared_with"])
    others = ", ".join(names[:SHOWN_MAX]) + (f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else "")
    counts = f"{shared['runs']} of {shared['all_runs']}, {shared['requests']} of {shared['all_requests']} requests"
    charged = f"charged {shared['charged_s']:.3g} of their {shared['whole_s']:.3g} {of} seconds"
    time_ratio = shared["time_ratio"]
    took = "" if time_ratio is None else f"; they took {_share_text(time_ratio)} of the time of separate runs"
    separate = f"{_share_text(shared['separate_part'])} of a run is separate for each function"
    return f"{counts}; {charged}{took}; {separate}; recently with {others}"


def _workers_that_have(explained: Description) -> list[Description]:
    id_ = f"{explained['name']}@{explained['version']}"
    return [worker for worker in explained["workers"] if any(bound["function"] == id_ for bound in worker["bound"])]


def _count(things: Sequence[object], one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


def _unmeasured_text(explained: Description) -> str:
    """Say how a function without a profile gets one, if it can."""
    in_slices = explained["settings"].get("device") == "pool" and (explained.get("pool") or {}).get("slices")
    return "none: only whole programs are measured" if in_slices else "none: `overwinter profile` measures it"


def _profile_text(profile: Description) -> str:
    age_s = profile["age_s"]
    age = "" if age_s is None else f", known for {age_s / 60:.0f} min"
    known = _count(profile["points"], "configuration", "configurations")
    slowdown = profile["slowdown"]
    least = "at least " if slowdown >= SLOWDOWN_MAX else ""
    text = f"{known}{age}; in service the latency is {least}{slowdown:.2f} times the profile's"
    if profile["points"]:
        cores, nbytes, batch, concurrency, latency_s = min(profile["points"], key=lambda point: float(point[4]))
        text += (
            f"; the fastest takes {_ms_text(latency_s * 1000)} with {Configuration(cores, batch, concurrency).text()}, "
            f"{size_text(nbytes)}"
        )
    return text


_WORKERS = (
    Column("WORKER", "word"),
    Column("STATE", "word"),
    Column("PID", drop_order=6),
    Column("IN STATE", drop_order=5),
    Column("CORES", drop_order=3),
    Column("BATCH", drop_order=4),
    Column("CONCURRENCY", drop_order=2),
    Column("RUNS NOW"),
    Column("PRIVATE"),
    Column("PSS", drop_order=1),
)


def _worker_row(worker: Description) -> tuple[str, ...]:
    return (
        str(worker["worker"]),
        worker["state"],
        "-" if worker["pid"] is None else str(worker["pid"]),
        f"{worker['since_s']:.1f} s",
        *(str(worker[key]) for key in ("cores", "batch", "concurrency", "runs")),
        *(_size_text(worker[key]) for key in ("private_bytes", "pss_bytes")),
    )


def _bound_table(workers: Sequence[Description]) -> Table:
    """Build a table with one row for each function in each worker."""
    table = _titled("WORKER", "FUNCTION", "STATE", numbers=("RUNS NOW", "REQUESTS NOW", "PRIVATE"))
    for worker in workers:
        for bound in worker["bound"]:
            part = "-" if bound["private_bytes"] is None else size_text(bound["private_bytes"])
            counts = (str(bound[key]) for key in ("runs", "requests"))
            table.add_row(str(worker["worker"]), bound["function"], bound["doing"], *counts, part)
        if more := worker["bound_count"] - len(worker["bound"]):
            table.add_row(str(worker["worker"]), f"and {more} more")
    return table


def _history_table(title: str, history: Sequence[Description]) -> Table:
    table = _titled(title, "WHAT")
    table.add_column("WHY", overflow="fold")
    for each in history:
        table.add_row(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["at"])), each["what"], each["why"])
    return table


def usage_table(used: Sequence[Description]) -> FittedTable:
    """Build a table with one row for each function of each tenant."""
    with_devices = any(each.get("device") for each in used)
    rows = [
        (
            each["tenant"],
            each["function"] or "(removed)",
            each["family"] or "-",
            each["since"],
            str(each["requests"]),
            *(f"{each[key]:.0f} ms" for key in ("core_ms", "idle_core_ms", "billed_core_ms")),
            *(_byte_hours_text(each[key]) for key in ("disk_byte_s", "host_byte_s", "private_byte_s")),
            *(_device_texts(each.get("device")) if with_devices else ()),
        )
        for each in used
    ]
    return FittedTable(_USAGE + _DEVICE_USAGE if with_devices else _USAGE, rows)


def _device_texts(used: Description | None) -> tuple[str, ...]:
    if used is None:
        return ("-",) * len(_DEVICE_USAGE)
    times = (f"{used[key]:.0f} ms" for key in ("device_ms", "idle_ms", "billed_ms"))
    return (*times, _size_text(used["moved_bytes"]), _byte_hours_text(used["device_byte_s"]))


_USAGE = (
    Column("TENANT", "name", 6),
    Column("FUNCTION", "name"),
    Column("FAMILY", "word", 1),
    Column("SINCE", "word", 2),
    Column("REQUESTS"),
    Column("CORE", drop_order=7),
    Column("IDLE CORE", drop_order=4),
    Column("BILLED"),
    Column("DISK", drop_order=3),
    Column("HOST", drop_order=5),
    Column("PRIVATE", drop_order=8),
)


_DEVICE_USAGE = (
    Column("DEVICE", drop_order=10),
    Column("IDLE DEVICE", drop_order=9),
    Column("DEVICE BILLED"),
    Column("MOVED", drop_order=9),
    Column("ON DEVICE", drop_order=4),
)


def _byte_hours_text(byte_s: float | None) -> str:
    return "-" if byte_s is None else f"{size_text(byte_s / 3600)} h"


def _size_text(nbytes: int | None) -> str:
    return "-" if nbytes is None else size_text(nbytes)


def _titled(*words: str, numbers: Sequence[str] = ()) -> Table:
    table = plain_table()
    for title in words:
        table.add_column(title, no_wrap=True)
    for title in numbers:
        table.add_column(title, no_wrap=True, justify="right")
    return table


def _ms_text(milliseconds: Any) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"

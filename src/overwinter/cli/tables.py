"""The tables of one function, one pipeline and the outputs of a run, and the formats that all tables share."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from overwinter.cli.options import printable, size_text
from overwinter.core.function import WORKER_SETTINGS
from overwinter.core.versions import WHOLE

PIPE_WIDTH = 100_000
"""The width without a terminal. It is so large that no column is left out."""

IDS_SHOWN = 20
"""The most functions of a family or a worker that a table lists."""
Description = dict[str, Any]
"""A function, pipeline, device or anything else, as the node's API describes it."""


class Terminal(Console):
    """Prints tables and texts without control characters, which a function's author may have written."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as a console does, and replace control characters in texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def show(what: object) -> None:
    """Print a table or a text."""
    console = Terminal()
    if not sys.stdout.isatty():
        console.width = PIPE_WIDTH
    console.print(what)


def pipeline_table(pipeline: Description, now: float) -> Table:
    """Build a table of all facts of a pipeline, one per row."""
    requests, slo_ms = pipeline["requests"], pipeline["settings"]["slo_ms"]
    return facts_table(
        {
            "pipeline": f"{pipeline['name']}@{pipeline['version']}",
            "state": f"{pipeline['state']} ({pipeline['reason']})" if pipeline["reason"] else pipeline["state"],
            "requests": f"{requests['running']} running, {requests['answered']} answered, {requests['failed']} failed",
            "SLO": "none" if slo_ms is None else f"{slo_text(slo_ms)}, met {requests['in_slo']} times",
            "timeout": f"{pipeline['settings']['timeout_s']:g} s for all stages together",
            "created": age_text(now - pipeline["created"]),
            **{f"input {spec['name']}": spec_text(spec) for spec in pipeline["inputs"]},
            **{f"stage {name}": _wiring_text(stage) for name, stage in pipeline["stages"].items()},
            **{
                f"output {spec['name']}": f"{spec_text(spec)} from {pipeline['sources'][spec['name']]}"
                for spec in pipeline["outputs"]
            },
        }
    )


def function_table(function: Description, now: float) -> Table:
    """Build a table of all facts of one version, one per row."""
    state = f"{function['state']}, {function['lifecycle']}"
    facts = {
        "function": f"{function['name']}@{function['version']}",
        "traffic": traffic_text(function),
        "tenant": function["tenant"],
        "state": f"{state} ({function['reason']})" if function["reason"] else state,
        "waiting": f"{function['waiting']} requests",
        **_sharing_facts(function),
        "size": f"{size_text(function['nbytes'])} with {function['blocks']} blocks of weights",
        "missing": f"{size_text(function['missing_bytes'])} from the host store",
        "handler": "yes" if function["handler"] else "no",
        **agreement_facts(function["agreement"]),
        "created": age_text(now - function["created"]),
        **{f"input {spec['name']}": spec_text(spec) for spec in function["inputs"]},
        **{f"output {spec['name']}": spec_text(spec) for spec in function["outputs"]},
        **{key: "none" if value is None else str(value) for key, value in _settings_of(function).items()},
    }
    return facts_table(facts)


def _settings_of(function: Description) -> Description:
    """Return the settings that have a meaning for the function."""
    settings: Description = function["settings"]
    in_workers = settings.get("device") != "pool" or function["handler"]
    without = frozenset[str]() if in_workers else WORKER_SETTINGS
    return {key: value for key, value in settings.items() if key not in without}


def _sharing_facts(function: Description) -> dict[str, str]:
    """Return the functions that share its workers, and what each worker has bound; with `device = "pool"`, instead, its
    devices and the workers of its handler; with `device = "any"`, its devices in addition.
    """
    device, facts = function["settings"].get("device", "cpu"), dict[str, str]()
    if device != "cpu":
        facts["resident"] = f"on {', '.join(function['devices'])}" if function["devices"] else "on no device"
    if device == "pool" and not function["handler"]:
        return facts
    if device == "pool" or function["sharing"] is None:
        return facts | {"workers": workers_text(function["workers"])}
    sharing = function["sharing"]
    facts |= {"family": members_text(sharing), "workers": workers_text(function["workers"])}
    for worker in sharing["workers"]:
        bound = ids_text(worker["bound"], worker["bound_count"])
        facts[f"worker {worker['worker']}"] = f"{worker['state']}, has {bound}"
    return facts


def version_text(function: Description) -> str:
    """Format a version with its share of the traffic, unless it gets all of it."""
    percent = function["traffic"]
    return f"{function['version']}{'' if percent == WHOLE else f' ({percent}%)'}"


def traffic_text(function: Description) -> str:
    """Format which share of the requests that name no version goes to this version, and why."""
    why = "as promoted or split" if function["promoted"] else "the newest version gets all"
    return f"{function['traffic']}% of the requests that name no version ({why})"


def members_text(family: Description) -> str:
    """Format the members of a family."""
    count = family["member_count"]
    return ids_text(family["members"], count) if count > 1 else "shares workers with no function"


def ids_text(ids: Sequence[str], count: int) -> str:
    """Join the first ids, and the number of further ones; `count`: the number of all."""
    shown = ids[:IDS_SHOWN]
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")


def family_text(function: Description) -> str:
    """Format the family of a function and the number of its members."""
    return "-" if function["members"] == 1 else f"{function['family']} ({function['members']})"


def locations_text(function: Description, device: str | None) -> str:
    """Format which workers have bound a function; with `device = "pool"` or `"any"`, after the devices on which it is
    resident. With `"pool"` the workers are those of its handler.
    """
    workers = workers_text(function["workers"])
    if device not in ("pool", "any"):
        return workers
    on_devices = f"{device}: {', '.join(function['devices'])}" if function["devices"] else device
    return f"{on_devices}; {workers}" if function["workers"] else on_devices


def workers_text(workers: Sequence[int]) -> str:
    """Format which workers have bound a function."""
    return ",".join(map(str, workers)) or "-"


def agreement_facts(agreement: Description | None) -> dict[str, str]:
    """Return how the program compared with its model, and whether requests may share a run."""
    if agreement is None:
        return {"agreement": "the program was not compared with its model"}
    count = len(agreement["sizes"])
    where = f"at {count} sizes" if count > 1 else "at its fixed sizes"
    facts = {"agreement": f"{_closeness_text(agreement['outputs'])}, {where}"}
    facts |= {f"agreement {number}": note for number, note in enumerate(agreement["notes"], 1)}
    obstacle = agreement["batching"]["obstacle"]
    shared = _closeness_text(agreement["batching"]["outputs"])
    return facts | {
        "batching": f"one request per run: {obstacle}" if obstacle else f"requests may share a run: {shared}"
    }


def _closeness_text(outputs: Mapping[str, Description]) -> str:
    if all(output["exact"] for output in outputs.values()):
        return "equal bit for bit"
    name = max(outputs, key=lambda name: outputs[name]["difference"])
    return f"largest difference {outputs[name]['difference']:.2g} of the largest number, in output {name!r}"


def outputs_table(outputs: Sequence[tuple[Description, Sequence[int], Any]]) -> Table:
    """Build a table of the outputs with spec, shape and shortened elements."""
    table = plain_table()
    for title in ("OUTPUT", "DATATYPE", "SHAPE"):
        table.add_column(title, no_wrap=True)
    table.add_column("VALUE", overflow="fold")
    for spec, shape, value in outputs:
        table.add_row(spec["name"], spec["datatype"], _shape_text(shape), short_text(value))
    return table


def spec_text(spec: Description) -> str:
    """Format the datatype and the shape of a tensor."""
    return f"{spec['datatype']} {_shape_text(spec['shape'])}"


def stage_text(stage: Description) -> str:
    """Format the function of a pipeline's stage."""
    version = stage.get("version")
    return stage["function"] if version is None else f"{stage['function']}@{version}"


def short_text(value: Any, shown: int = 4) -> str:
    """Format a nested list with at most `shown` elements at either end of each level, floats with four digits, text
    quoted.
    """
    if isinstance(value, list):
        texts = [short_text(item, shown) for item in value[:shown]]
        if len(value) > 2 * shown:
            texts.append("…")
        texts += [short_text(item, shown) for item in value[max(shown, len(value) - shown) :]]
        return f"[{', '.join(texts)}]"
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def age_text(seconds: float) -> str:
    """Format an age in the largest unit in which it is at least 1."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def slo_text(slo_ms: float | None) -> str:
    """Format a latency objective."""
    return "-" if slo_ms is None else f"{slo_ms:g} ms"


def _wiring_text(stage: Description) -> str:
    taken = ", ".join(f"{name} from {source}" for name, source in stage.get("inputs", {}).items())
    return f"{stage_text(stage)}, inputs: {taken or 'none'}"


def facts_table(facts: Mapping[str, str]) -> Table:
    """Build a table with one fact per row."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def plain_table() -> Table:
    """Create an empty table whose only line is under its titles."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")


def _shape_text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"

"""Prints three tables: every function, all of them compared with separate processes, and the pool."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from examples.demo_comparison import Verdict
from examples.demo_pool import DEVICES, LATER_REQUESTS, MEMORY_BYTES, OTHER, CalledAlone, PoolResult
from examples.plain_process import PlainProcess
from examples.variants import Classifier
from overwinter.api.deployer import Uploaded

WIDTH = 150
"""The width if there is no terminal."""


class Asleep(NamedTuple):
    """A node whose functions all sleep: its processes, their memory, and the blocks in the host store."""

    processes: int
    process_bytes: int
    store_bytes: int


def show_functions(verdicts: Sequence[Verdict], uploads: dict[str, Uploaded]) -> None:
    """Print a line for each function: its answer, latency and cost."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=True)
    table.add_column("function", no_wrap=True)
    table.add_column("answer", ratio=1)
    table.add_column("agreement", no_wrap=True)
    for title in ("wakes in", "binds in", "warm", "needs", "added"):
        table.add_column(title, no_wrap=True, justify="right")
    for verdict in verdicts:
        upload = uploads[verdict.function]
        table.add_row(
            verdict.function,
            Text(verdict.answer),
            _agreement(verdict),
            *_first(verdict),
            _milliseconds(verdict.warm_seconds),
            decimal(upload.nbytes),
            decimal(upload.added_bytes),
        )
    _print(table)
    _print(
        "agreement: of all these answers with plain PyTorch in this process. wakes in: from the first request to a "
        "sleeping function until its answer;\nbinds in: the same where a sibling is awake, whose worker binds it. "
        "warm: the same again, the median.\nneeds: bytes of the function; added: those of them that were sent."
    )


def show_totals(
    verdicts: Sequence[Verdict], uploads: dict[str, Uploaded], variants: int, asleep: Asleep, plain: PlainProcess
) -> None:
    """Print the memory of the node while all functions sleep, compared with one plain PyTorch process per function."""
    count = len(uploads)
    needed = sum(upload.nbytes for upload in uploads.values())
    node = asleep.process_bytes + asleep.store_bytes
    # Only the family is counted at its measured size; other models count as if they had no weights.
    separate = variants * plain.loaded_bytes + (count - variants) * plain.empty_bytes
    wakes = [verdict.first_seconds for verdict in verdicts if verdict.start != "bound"]
    binds = [verdict.first_seconds for verdict in verdicts if verdict.start == "bound"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(f"all {count} functions asleep")
    for title in ("separate processes", "Overwinter", "share"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_row("processes kept", str(count), f"{asleep.processes}", "")
    table.add_row("models in memory", decimal(needed), decimal(asleep.store_bytes), _share(asleep.store_bytes, needed))
    table.add_row("memory in all", decimal(separate), decimal(node), _share(node, separate))
    first = plain.first_answer_seconds
    for title, seconds in (("first answer, asleep", wakes), ("first answer, a sibling awake", binds)):
        if seconds:
            table.add_row(title, _milliseconds(first), _milliseconds(median(seconds)), _share(median(seconds), first))
    _print(table)
    _print(
        f"Overwinter keeps {asleep.processes} processes (its daemon, zygotes, and workers forked ahead), "
        f"{decimal(asleep.process_bytes)}, and each block once.\n"
        f"Separate processes: one was measured, {decimal(plain.empty_bytes)} with PyTorch imported and "
        f"{decimal(plain.loaded_bytes)} with MiniLM loaded;\nso {variants} times the latter and {count - variants} "
        "times the former. Pages of library files, which all processes share, are left out on both sides.\n"
        f"First answer: of the process from its start; of Overwinter the median of {len(wakes)} wakes and of "
        f"{len(binds)} binds.\n"
    )


def show_pool(result: PoolResult) -> None:
    """Print what the functions of the pool brought to the devices, and their latencies."""
    first, *siblings = [each for each in result.functions if isinstance(each.model.module, Classifier)]
    others = [each for each in result.functions if not isinstance(each.model.module, Classifier)]
    count, together = len(result.functions), result.together
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(f"{count} functions in a pool of {DEVICES} devices")
    table.add_column("agreement", no_wrap=True)
    for title in ("needs", "moved", "first answer", "next answer"):
        table.add_column(title, no_wrap=True, justify="right")
    rows = {
        "a variant, on an empty device": [first],
        f"{len(siblings)} more, beside their sibling": siblings,
        f"{OTHER}, in their place": others,
    }
    for title, group in rows.items():
        if group:
            table.add_row(title, *_pooled(group))
    at_once = f"{together.requests} requests at once, on {together.devices}"
    table.add_row(at_once, _equality(together.agrees), "", decimal(together.moved_bytes), "", "")
    _print(table)
    _print(
        f"The pool: MiniLM's variants and {OTHER} once more, without handlers, on virtual devices (on the CPU) of "
        f"{decimal(MEMORY_BYTES)} each.\nThis memory comes on top of the above; the node reserves it when a device is "
        "first used. Medians of the functions. moved: bytes that a function\nbrought to its device, of those that it "
        f"needs. first answer: with this swap; next answer: the median of {LATER_REQUESTS}, while it is resident.\n"
    )


def _pooled(group: Sequence[CalledAlone]) -> tuple[str, ...]:
    return (
        _equality(all(each.agrees for each in group)),
        decimal(int(median(each.nbytes for each in group))),
        decimal(int(median(each.moved_bytes for each in group))),
        _milliseconds(median(each.first_seconds for each in group)),
        _milliseconds(median(each.next_seconds for each in group)),
    )


def _equality(agrees: bool) -> str:
    return "[green]bit for bit[/]" if agrees else "[bold red]DIFFERS[/]"


def _agreement(verdict: Verdict) -> str:
    if verdict.difference is None:
        return "[green]bit for bit[/]"
    colour = "green" if verdict.agrees else "bold red"
    return f"[{colour}]{'within' if verdict.agrees else 'DIFFERS by'} {verdict.difference:.1e}[/]"


def _first(verdict: Verdict) -> tuple[str, str]:
    """Format the latency of the first answer, under the kind of its start."""
    took = _milliseconds(verdict.first_seconds)
    if verdict.start == "bound":
        return "", took
    return took + ("" if verdict.start == "host" else f" ({verdict.start})"), ""


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds * 1000:,.0f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"


def _print(what: object) -> None:
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(what)

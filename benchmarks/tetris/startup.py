"""Measures how fast an instance starts: the paper's figures 9b, 11b and 14e.

The time of a start is the time to the first answer minus that of a warm answer. Without Overwinter, a new process
imports its libraries and loads the model with `torch.load`, from the disk (page cache dropped) or from the page cache;
the part without the imports is reported too. With Overwinter, a function without a worker is called, while

* same: another function with the same blocks is in the host store,
* other: only a variant is there, so that the last layer comes from the repository,
* none: nothing is there, and the repository is in the page cache,
* none, disk: nothing is there, and the page cache was dropped.

Contention: the mean time to load for many functions that start at the same moment from the disk, compared with as many
plain processes that have done their imports and load at the same moment.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from safetensors.torch import save_file

from benchmarks.families import Family, as_tensors
from benchmarks.nodes import Node, forget_pages, running_node
from benchmarks.plain import save
from benchmarks.tetris.loading import Loaded, Loader
from benchmarks.tetris.memory import SEPARATE, renamed_copy
from benchmarks.wire import Connection, binary_request
from overwinter.api.client import Client

NAMES = ("base", "same", "other")
RUNS = 5
WARM_RUNS = 3
"""The warm runs of which the fastest is subtracted from a start."""
VARIANT = 1


class Start(NamedTuple):
    """The seconds of one model."""

    plain_disk: Loaded
    plain_cached: Loaded
    same: float
    other: float
    cached: float
    disk: float

    @property
    def saved(self) -> float:
        """The saved share of the start of a process from the page cache, if a function with the same blocks is
        present.
        """
        return 1 - self.same / self.plain_cached.start_s

    @property
    def saved_of_loading(self) -> float:
        """The same for loading alone, as if processes with all imports were available at no cost."""
        return 1 - self.same / self.plain_cached.model_s


class Contention(NamedTuple):
    """The mean seconds until a model is loaded, when many load at the same moment."""

    absent: float
    """With Overwinter, from the load request on; the blocks are not in memory."""
    present: float
    """With Overwinter; one function has the blocks."""
    plain: float
    """Processes with all imports done."""


class Bench:
    """A node with a model, a copy of it under another name, and a variant; measures starts of the three."""

    def __init__(self, node: Node, family: Family) -> None:
        self._node = node
        self._requests = {name: binary_request(name, as_tensors(family.one())) for name in NAMES}
        ready, answer = family.packaged("base", **SEPARATE), family.answer()
        for name in NAMES[:2]:
            renamed_copy(ready, name).upload(node.client)
        family.vary(family.head(), VARIANT)
        family.deploy(node.client, "other", **SEPARATE)
        self._answers = {"base": answer, "same": answer, "other": family.answer()}
        family.vary(family.head(), 0)
        # Each has run once, so that its program is compiled.
        for name in NAMES:
            self._ask(name)
        node.wait_quiet()

    def start(self, name: str, present: Sequence[str], forget: bool = False) -> float:
        """Return the seconds of a start of one function, while only the present ones are in the host store."""
        prepare(self._node, NAMES, present, name, forget)
        began = time.perf_counter()
        self._node.client.load(name)
        self._ask(name)
        took = time.perf_counter() - began
        return took - min(self._ask(name) for _ in range(WARM_RUNS))

    def _ask(self, name: str) -> float:
        """Return the seconds of a request; raise RuntimeError if its answer is wrong."""
        began = time.perf_counter()
        with Connection(self._node.port) as connection:
            if connection.ask(self._requests[name]).tensors != self._answers[name]:
                raise RuntimeError(f"{name} does not answer as plain PyTorch does")
        return time.perf_counter() - began


def measure_start(family: Family, runs: int = RUNS) -> Start:
    """Measure all starts of one model."""
    with running_node() as node:
        bench = Bench(node, family)

        def middle(name: str, present: Sequence[str], forget: bool = False) -> float:
            return median(bench.start(name, present, forget) for _ in range(runs))

        ours = middle("same", ["base"]), middle("other", ["base"]), middle("base", []), middle("base", [], forget=True)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        plain = plain_files(family, Path(root))
        forget_pages(Path(root))
        disk = load_at_once(family.name, plain, 1)[0]
        cached = load_at_once(family.name, plain, 1)[0]
    return Start(disk, cached, *ours)


def prepare(node: Node, names: Sequence[str], present: Sequence[str], wanted: str, forget: bool) -> None:
    """Leave only the functions `present` in the host store, and wait.

    Raise RuntimeError if `wanted` has a worker, or if it lacks the wrong number of bytes: it must lack all if no
    function is present, and fewer otherwise.
    """
    for name in names:
        node.client.unload(name)
    for name in present:
        node.client.load(name)
    if forget:
        forget_pages(node.data)
    node.wait_quiet()
    found = node.client.function(wanted)
    if found["workers"] or bool(present) == (found["missing_bytes"] == found["nbytes"]):
        raise RuntimeError(
            f"before its start {wanted} lacks {found['missing_bytes']} bytes of {found['nbytes']}: {found}"
        )


def plain_files(family: Family, root: Path) -> tuple[Path, Path]:
    """Write weights and inputs for plain processes."""
    save(family.state(), root / "weights")
    save_file(family.one(), root / "inputs.safetensors")
    return root / "weights.pt", root / "inputs.safetensors"


def load_at_once(
    model: str, files: tuple[Path, Path], count: int, before: Callable[[], None] | None = None
) -> list[Loaded]:
    """Let this many plain processes load at the same moment; `before` is called just before that."""
    loaders = [Loader(model, *files) for _ in range(count)]
    if before is not None:
        before()
    for loader in loaders:
        loader.go()
    return [loader.loaded() for loader in loaders]


def measure_contention(family: Family, counts: Sequence[int]) -> dict[int, Contention]:
    """Measure starts from disk, for each count this many at the same moment."""
    absent: dict[int, float] = {}
    present: dict[int, float] = {}
    with running_node() as node:
        ready = family.packaged("it", **SEPARATE)
        first, *names = (f"it-{number}" for number in range(max(counts) + 1))
        for name in (first, *names):
            renamed_copy(ready, name).upload(node.client)
        for count in counts:
            for kind in (absent, present):
                prepare(node, (first, *names), [first] if kind is present else [], names[0], forget=True)
                kind[count] = fmean(_start_at_once(node, names[:count]))
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        files = plain_files(family, Path(root))

        def forget() -> None:
            forget_pages(Path(root))

        plain = {
            count: fmean(each.load_s for each in load_at_once(family.name, files, count, forget)) for count in counts
        }
    return {count: Contention(absent[count], present[count], plain[count]) for count in counts}


def _start_at_once(node: Node, names: Sequence[str]) -> list[float]:
    """Return the seconds until each of these functions has a worker."""

    def start(name: str) -> float:
        with Client(node.url) as client:
            client.live()
            began = time.perf_counter()
            client.load(name)
            return time.perf_counter() - began

    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(start, names))


def report(rows: dict[str, Start]) -> None:
    """Print the table of starts."""
    print(
        "\nstart of an instance in ms: first answer minus a warm one; `saved`: by `same`, of a process from page cache"
    )
    print(f"{'':16}{'plain process':>24}{'its loading alone':>24}{'Overwinter: the host store holds':>46}")
    titles = ("disk", "page cache", "disk", "page cache", "same", "other", "none", "none, disk")
    print(f"{'model':16}" + "".join(f"{title:>12}" for title in titles) + f"{'saved':>9}{'of loading':>12}")
    for name, row in rows.items():
        plain = (row.plain_disk.start_s, row.plain_cached.start_s, row.plain_disk.model_s, row.plain_cached.model_s)
        times = (*plain, row.same, row.other, row.cached, row.disk)
        cells = "".join(f"{1e3 * seconds:12.0f}" for seconds in times)
        print(f"{name:16}{cells}{row.saved:9.1%}{row.saved_of_loading:12.1%}", flush=True)


def report_contention(model: str, found: dict[int, Contention]) -> None:
    """Print the table of simultaneous starts."""
    print(f"\n{model}, starts at the same moment, page cache dropped: mean ms to load")
    print(f"{'':38}" + "".join(f"{count:>10}" for count in found))
    titles = ("Overwinter, none has the blocks", "Overwinter, one has them", "plain processes, imports done before")
    for place, title in enumerate(titles):
        print(f"{title:38}" + "".join(f"{1e3 * times[place]:10.0f}" for times in found.values()), flush=True)

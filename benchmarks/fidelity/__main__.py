"""`python -m benchmarks.fidelity [--only NAME] [--seed N] [--drawn N] [--table FILE] [--list]`.

Small architectures from `transformers` configurations and plain PyTorch, with random weights, each through one real
node: deployed over HTTP, called at several sizes and by many clients at once, and compared with eager PyTorch. The last
ones are drawn by the seed from the model types of `transformers` that the others lack. Each is examined in a process
forked for it, which bounds the memory and what one model can disturb.
"""

import argparse
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.fidelity import drawn, plain_models, saved_models, text_models, vision_models
from benchmarks.fidelity.architecture import Architecture
from benchmarks.fidelity.exam import Row, examine
from benchmarks.fidelity.judge import VERDICTS, Finding
from benchmarks.fidelity.table import row_text, written
from benchmarks.measure import print_result
from benchmarks.nodes import running_node

LIMIT_S = 300.0
"""The longest time for one architecture."""


class Skipped(NamedTuple):
    """A random model type that cannot be tested, and why."""

    name: str
    why: str


def listed() -> list[Architecture]:
    """Return every architecture that is listed in the source."""
    return [*text_models.MODELS, *vision_models.MODELS, *plain_models.MODELS, *saved_models.MODELS]


def in_separate_process(name: str, work: Callable[[], Row | Skipped]) -> Row | Skipped:
    """Return the result of `work` in a separate process, or a row that reports a crash or a timeout."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(theirs, work))
    with warnings.catch_warnings():
        # Libraries keep idle threads, but the child process does not use them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    try:
        if ours.poll(LIMIT_S):
            return ours.recv()
        what = f"it took over {LIMIT_S:.0f} s"
    except EOFError:
        process.join()
        what = f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Row(name, "", 0, (Finding("deploy", "wrong", text=what),), Finding("shared", "equal"))


def _report(pipe: Connection, work: Callable[[], Row | Skipped]) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        pipe.send(work())


def prepare() -> None:
    """Import what every export needs, once for all processes."""
    # Nothing is downloaded: a model that needs a download cannot be built.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    from transformers import modeling_utils  # noqa: F401

    from overwinter.model.export import export

    torch.set_num_threads(1)
    export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))


def rows(chosen: Sequence[Architecture], url: str, seed: int) -> list[Row]:
    """Return a row for each architecture, each printed at once."""
    found = []
    for architecture in chosen:
        began = time.perf_counter()
        row = in_separate_process(architecture.name, lambda one=architecture: examine(one, url, seed))
        assert isinstance(row, Row)
        print(row_text(row._replace(source=architecture.source), time.perf_counter() - began), flush=True)
        found.append(row._replace(source=architecture.source))
    return found


def drawn_rows(kinds: Sequence[str], count: int, url: str, seed: int) -> tuple[list[Row], list[Skipped]]:
    """Return rows of the first `count` model types that can be tested, and the types that cannot."""
    found: list[Row] = []
    skipped: list[Skipped] = []
    for kind in kinds:
        if len(found) == count:
            break
        began = time.perf_counter()
        row = in_separate_process(drawn.name_of(kind), lambda one=kind: _examine_drawn(one, url, seed))
        if isinstance(row, Skipped):
            print(f"{drawn.name_of(kind):29} skipped: {row.why}", flush=True)
            skipped.append(row)
        else:
            found.append(row._replace(source=row.source or f"transformers {kind}, drawn"))
            print(row_text(found[-1], time.perf_counter() - began), flush=True)
    return found, skipped


def _examine_drawn(kind: str, url: str, seed: int) -> Row | Skipped:
    try:
        architecture = drawn.architecture(kind, seed)
    except drawn.CannotBuildError as error:
        return Skipped(kind, str(error))
    return examine(architecture, url, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="test only this architecture, a name of --list or drawn-TYPE; repeatable",
    )
    parser.add_argument("--seed", type=int, default=8, help="seed of weights, inputs and the drawn types; default 8")
    parser.add_argument("--drawn", type=int, default=10, metavar="N", help="number of model types to draw; default 10")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table to this Markdown file")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    options = parser.parse_args()
    known = {architecture.name: architecture for architecture in listed()}
    if options.list:
        print("\n".join(f"{name:29} {architecture.source}" for name, architecture in known.items()))
        return
    if options.only is None:
        chosen = list(known.values())
        kinds = drawn.model_types(architecture.kind for architecture in chosen)
        random.Random(options.seed).shuffle(kinds)
        count = options.drawn
    else:
        types = {drawn.name_of(kind): kind for kind in drawn.model_types([])}
        if unknown := set(options.only) - known.keys() - types.keys():
            parser.error(f"no architecture is called {sorted(unknown)[0]!r}; --list prints all names")
        chosen = [known[name] for name in options.only if name in known]
        kinds = [types[name] for name in options.only if name not in known]
        count = len(kinds)
    prepare()
    began = time.perf_counter()
    with running_node("--cores", "1") as node:
        found = rows(chosen, node.url, options.seed)
        if count:
            print(f"the first {count} that can be run of {len(kinds)} model types in the order of seed {options.seed}:")
        last, skipped = drawn_rows(kinds, count, node.url, options.seed)
        found += last
    print(f"{time.perf_counter() - began:.0f} s")
    if options.table is not None:
        options.table.write_text(written(found, skipped, options.seed))
    counts = {verdict: sum(row.verdict == verdict for row in found) for verdict in VERDICTS}
    print_result({"models": len(found), **counts})


if __name__ == "__main__":
    main()

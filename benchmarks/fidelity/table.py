"""Formats the findings as lines and as a Markdown table."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.fidelity.exam import CALLERS, MAX_BATCH, Row
from benchmarks.fidelity.judge import BOUNDS, VERDICTS, Finding

HEAD = """# Answers of a node compared with eager PyTorch

`python -m benchmarks.fidelity --seed {seed} --table docs/fidelity.md` wrote this file. Each architecture is built
with small sizes where its configuration allows them, and with random weights; no norm or bias is left at 0 or 1. All
run on one real node, over HTTP. Each is deployed with dynamic sizes, and called at batches of 1, 2 and 3; other dynamic
sizes are 1, 2, 3 and another value. The answers are compared with the author's module in eager PyTorch; those of a
`.pt2` file with the module in that file, which itself refuses some sizes. If a deploy with another dynamic size than
the batch is refused, the model is deployed again with only the batch dynamic.

* **equal**: every answer equals that of eager PyTorch, bit for bit. **within**: every answer is within {bounds}
  of the largest magnitude.
* **refused clearly**: the deploy, or a size at which eager PyTorch runs, is refused in one sentence, which the table
  shows; all answers are equal or within. Where eager PyTorch raises an error too, a refusal counts as equal and is not
  shown.
* **compared at**: the sizes at which both answered; `-` if no answer was compared. The verdict **equal** then says that
  both refused every size.
* **shared runs**: {callers} concurrent clients with `max_batch={max_batch}`, each compared with eager PyTorch on its
  own input alone: the largest difference, and the number of runs that the node needed for these requests.
  If a deploy with `max_batch={max_batch}` is refused, the column says so, and the verdict does not change.
* **drawn**: the model type was selected at random, by the seed, from those of `transformers` that no other row has.

PyTorch's fused kernel for `nn.TransformerEncoder` returns zeros at padded positions. The unfused layers, and therefore
a program, return other values there. Where eager PyTorch uses the fused kernel, padded positions are not compared.

{counts}

| architecture | source | parameters | compared at | verdict | largest difference | shared runs | refused |
| --- | --- | --: | --- | --- | --: | --- | --- |
"""
"""The text before the rows."""
ROOT = Path(__file__).parents[2]
PLACE = re.compile(rf"/[^\s\"']*/(?=site-packages/)|{re.escape(str(ROOT))}/")
"""The prefix of paths on this machine."""


def row_text(row: Row, seconds: float) -> str:
    """Format some lines for the terminal."""
    line = f"{row.name:29} {row.verdict:16} {difference(row.findings):>8}  shared {shared(row)}  ({seconds:.1f} s)"
    return "\n".join([line, *(f"    {one.where}: {one.text}" for one in refusals(row))])


def written(rows: Sequence[Row], skipped: Sequence[tuple[str, str]], seed: int) -> str:
    """Return the whole file."""
    total = ", ".join(f"{sum(row.verdict == verdict for row in rows)} {verdict_text(verdict)}" for verdict in VERDICTS)
    bounds = ", ".join(f"{bound:g} ({str(dtype).removeprefix('torch.')})" for dtype, bound in BOUNDS.items())
    head = HEAD.format(
        seed=seed, bounds=bounds, callers=CALLERS, max_batch=MAX_BATCH, counts=f"{len(rows)} architectures: {total}."
    )
    lines = [f"| {' | '.join(cells(row))} |" for row in rows]
    if skipped:
        lines += ["", "Drawn as well, but skipped because no small model of the type could be built or run:", ""]
        lines += [f"* `{name}`: {escaped(why)}" for name, why in skipped]
    return head + "\n".join(lines) + "\n"


def cells(row: Row) -> Iterator[str]:
    """Format one row of the table."""
    yield from (row.name, row.source, f"{row.parameters:,}", compared(row), verdict_text(row.verdict))
    yield difference(row.findings)
    yield escaped(shared(row))
    yield "<br>".join(escaped(f"{one.where}: {one.text}") for one in refusals(row)) or "-"


def refusals(row: Row) -> Iterator[Finding]:
    """Yield refusals and errors, each sentence once."""
    seen = set()
    for finding in (*row.findings, row.shared):
        if finding.verdict in ("refused_clearly", "wrong") and finding.text not in seen:
            seen.add(finding.text)
            yield finding


def compared(row: Row) -> str:
    """Return the sizes at which an answer was compared: each size alone, then those that varied together."""
    alone: dict[str, list[str]] = {}
    together = []
    for where in (finding.where for finding in row.findings if finding.compared):
        name, _, size = where.partition("=")
        if size.isdigit():
            alone.setdefault(name, []).append(size)
        else:
            together.append(where)
    return "; ".join([*(f"{name} {', '.join(sizes)}" for name, sizes in alone.items()), *together]) or "-"


def difference(findings: Sequence[Finding]) -> str:
    """Return the largest of the differences; `-` if no answer was compared."""
    if not any(finding.compared for finding in findings):
        return "-"
    largest = max(finding.difference for finding in findings)
    return "0" if largest == 0 else f"{largest:.1e}"


def shared(row: Row) -> str:
    """Format the finding on concurrent clients."""
    one = row.shared
    if one.verdict in ("refused_clearly", "wrong") or not one.compared:
        return verdict_text(one.verdict) if one.verdict in ("refused_clearly", "wrong") else one.text or "-"
    return f"{difference([one])}, {one.text}"


def verdict_text(verdict: str) -> str:
    """A verdict for a reader."""
    return verdict.replace("_", " ")


def escaped(text: str) -> str:
    """Text that a cell of a public table can hold."""
    return PLACE.sub("", text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

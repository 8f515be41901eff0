"""Judges whether an answer is right, and whether a refusal is clear.

The verdict on an architecture is the worst of its findings. It is "wrong" unless every answer equals eager PyTorch's,
bit for bit ("equal") or within the bound of its type ("within"), and every refusal is one clear sentence.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Verdict = Literal["equal", "within", "refused_clearly", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("equal", "within", "refused_clearly", "wrong")
"""From best to worst."""

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}
"""The largest difference of an answer, relative to its largest magnitude, by type; integers must be equal."""

LONGEST_REFUSAL = 400
INTERNAL = re.compile(
    r"__\w+__|Traceback|\b[A-Z]\w+Error: |object has no attribute|object at 0x|does not have a field|NoneType"
    r"|FakeTensor|L\['|Proxy\(|<function|<class|<built-in|torch\._C|GuardOnDataDependent|graph\(\)|\b[su]\d+\b"
)
"""Text that refers to internals of a tool rather than to the author's model."""
REMEDY = re.compile(
    r"(?:[;:,.(]|\b(?:or|so|and)) (?:use|set|give|leave|wrap|narrow|fix|change|export|replace|write|pass|make|choose"
    r"|raise|keep|call|compute|split|convert|move|turn|try|put|remove|mark|name|load|send|take|ask|deploy|read|return|draw)\b"
    r"|\bmust (?:be|not|hold)\b|\bneeds\b|\binstead\b"
)
"""Words that name a remedy, or a condition."""


class Finding(NamedTuple):
    """A finding at one size, or of the shared runs."""

    where: str
    verdict: Verdict
    difference: float = 0.0
    """The largest difference, relative to the largest magnitude of its output."""
    text: str = ""
    """The refusal or the error."""
    compared: bool = False
    """Whether there was an answer, and an eager answer to compare with."""


def judged(where: str, expected: Sequence[Tensor], given: Sequence[Tensor]) -> Finding:
    """Judge one answer, output by output."""
    if len(expected) != len(given):
        return Finding(where, "wrong", text=f"{len(given)} outputs, eager gives {len(expected)}", compared=True)
    found = Finding(where, "equal", compared=True)
    for index, (want, have) in enumerate(zip(expected, given, strict=True)):
        if want.shape != have.shape or want.dtype != have.dtype:
            message = f"output {index} is {have.dtype} {list(have.shape)}, eager gives {want.dtype} {list(want.shape)}"
            return Finding(where, "wrong", text=message, compared=True)
        if is_same(want, have):
            continue
        apart = difference(want, have)
        if not apart <= BOUNDS.get(want.dtype, 0.0):
            return Finding(where, "wrong", apart, f"output {index} differs by {apart:.1e}", compared=True)
        found = Finding(where, "within", max(apart, found.difference), compared=True)
    return found


def is_same(want: Tensor, have: Tensor) -> bool:
    """Whether two tensors of one shape and type have the same bits."""
    return torch.equal(want.contiguous().view(-1).view(torch.uint8), have.contiguous().view(-1).view(torch.uint8))


def difference(want: Tensor, have: Tensor) -> float:
    """Return the largest difference relative to the largest finite expected magnitude; infinite where NaN or infinities
    differ.
    """
    want, have = want.double(), have.double()
    finite = want.isfinite()
    if (
        not torch.equal(want[~finite].nan_to_num(0.5), have[~finite].nan_to_num(0.5))
        or not have[finite].isfinite().all()
    ):
        return float("inf")
    want, have = want[finite], have[finite]
    if not want.numel() or torch.equal(want, have):
        return 0.0
    return ((want - have).abs().max() / want.abs().max()).item()


def fault_of(refusal: str) -> str | None:
    """Return why a refusal is not one clear sentence, or None."""
    if len(refusal) > LONGEST_REFUSAL:
        return f"{len(refusal)} characters"
    if len(refusal.strip().splitlines()) != 1:
        return "not one line"
    if (inside := INTERNAL.search(refusal)) is not None:
        return f"it mentions {inside[0]!r}"
    return None if REMEDY.search(refusal) else "it names no remedy"


def refused(where: str, sentence: str) -> Finding:
    """Judge a refusal."""
    fault = fault_of(sentence)
    if fault is None:
        return Finding(where, "refused_clearly", text=sentence)
    return Finding(where, "wrong", text=f"unclear refusal ({fault}): {sentence}")


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict on all findings."""
    return VERDICTS[max(VERDICTS.index(finding.verdict) for finding in findings)]

"""When is an answer right, and when is a refusal clear?

A verdict is the worst of what was seen of an architecture: "wrong" unless every answer is eager PyTorch's own, bit for
bit ("equal") or within the bound of its type ("within"), or what was not answered was refused in one clear sentence.
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
"""Largest difference of an answer, as a share of the largest magnitude in it, by type; whole numbers must be equal."""

LONGEST_REFUSAL = 400
INTERNAL = re.compile(
    r"__\w+__|Traceback|\b[A-Z]\w+Error: |object has no attribute|object at 0x|does not have a field|NoneType"
    r"|FakeTensor|L\['|Proxy\(|<function|<class|<built-in|torch\._C|GuardOnDataDependent|graph\(\)|\b[su]\d+\b"
)
"""What tells of the inside of a tool and not of the author's model."""
WAY_OUT = re.compile(
    r"(?:[;:,.(]|\b(?:or|so|and)) (?:use|set|give|leave|wrap|narrow|fix|change|export|replace|write|pass|make|choose"
    r"|raise|keep|call|compute|split|convert|move|turn|try|put|remove|mark|name|load|send|take|ask|deploy|read|return|draw)\b"
    r"|\bmust (?:be|not|hold)\b|\bneeds\b|\binstead\b"
)
"""Words that say what is to be done, or what must hold."""


class Finding(NamedTuple):
    """What was seen at one place: a size, or the joined runs."""

    where: str
    verdict: Verdict
    difference: float = 0.0
    """The largest, as a share of the largest magnitude of its output."""
    text: str = ""
    """What was refused, or is wrong."""
    compared: bool = False
    """Whether there was an answer, and one of eager's beside it."""


def judged(where: str, expected: Sequence[Tensor], given: Sequence[Tensor]) -> Finding:
    """What there is to say of one answer, output by output."""
    if len(expected) != len(given):
        return Finding(where, "wrong", text=f"{len(given)} outputs, eager gives {len(expected)}", compared=True)
    found = Finding(where, "equal", compared=True)
    for index, (want, have) in enumerate(zip(expected, given, strict=True)):
        if want.shape != have.shape or want.dtype != have.dtype:
            told = f"output {index} is {have.dtype} {list(have.shape)}, eager gives {want.dtype} {list(want.shape)}"
            return Finding(where, "wrong", text=told, compared=True)
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
    """The largest difference over the largest finite magnitude wanted; infinite where NaN or infinities differ."""
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
    """What keeps a refusal from being one clear sentence; None if nothing does."""
    if len(refusal) > LONGEST_REFUSAL:
        return f"{len(refusal)} characters"
    if len(refusal.strip().splitlines()) != 1:
        return "not one line"
    if (inside := INTERNAL.search(refusal)) is not None:
        return f"it speaks of {inside[0]!r}"
    return None if WAY_OUT.search(refusal) else "it names no way out"


def refused(where: str, sentence: str) -> Finding:
    """What there is to say of a refusal."""
    fault = fault_of(sentence)
    if fault is None:
        return Finding(where, "refused_clearly", text=sentence)
    return Finding(where, "wrong", text=f"unclear refusal ({fault}): {sentence}")


def worst(findings: Sequence[Finding]) -> Verdict:
    """The verdict on all that was seen."""
    return VERDICTS[max(VERDICTS.index(finding.verdict) for finding in findings)]

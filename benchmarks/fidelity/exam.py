"""Tests one architecture on a node: deploys it, calls it at each size, and from many clients at once."""

import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import overwinter
from benchmarks.fidelity.architecture import Architecture, Sizes, leaves
from benchmarks.fidelity.judge import Finding, Verdict, judged, refused, worst
from overwinter.api.deployer import deploy_agreed
from overwinter.core.errors import AuthorError, CallerError, OverwinterError
from overwinter.core.function import Settings
from overwinter.model.agreement import agree
from overwinter.model.export import export_saved

SETTINGS: dict[str, Any] = {"timeout_s": 30.0, "max_workers": 1}
MAX_BATCH = 4
CALLERS = 16
METRICS = ("batch_size_sum", "batch_size_count")

Inputs = dict[str, Tensor]


class Row(NamedTuple):
    """The findings on one architecture."""

    name: str
    source: str
    parameters: int
    findings: tuple[Finding, ...]
    shared: Finding
    """The finding on requests that may share runs."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on all answers. Those of shared runs count only if they are wrong, because other sizes use other
        kernels.
        """
        return "wrong" if self.shared.verdict == "wrong" else worst(self.findings)


def eager(module: Callable[..., Any], inputs: Inputs) -> list[Tensor] | Exception:
    """Return the module's own outputs, or what it raises; with equal random numbers at each call."""
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            return leaves(module(**{name: tensor.clone() for name, tensor in inputs.items()}))
    except Exception as error:  # noqa: BLE001 - whatever an author's module raises
        return error


def examine(architecture: Architecture, url: str, seed: int) -> Row:
    """Deploy one architecture on the node at `url`, return all findings, and remove the function.

    If it cannot be deployed with dynamic sizes, it is deployed with only the batch dynamic, as the refusal advises.
    """
    reference = architecture.reference(seed)
    module = architecture.build(seed)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    findings: list[Finding] = []
    shared = Finding("shared", "equal")
    with overwinter.Client(url) as client:
        for deployed_as in [architecture, *architecture.with_fixed_sizes()]:
            refused_sharing = _deploy(deployed_as, module, url, seed, MAX_BATCH)
            refusal = refused_sharing if refused_sharing is None else _deploy(deployed_as, module, url, seed, 1)
            if refusal is not None:
                findings.append(refusal)
                continue
            findings += [_compare_answer(client, deployed_as, reference, sizes, seed) for sizes in deployed_as.cases()]
            shared = (
                _compare_shared_runs(client, deployed_as, reference, seed)
                if refused_sharing is None
                else refused_sharing
            )
            client.remove(deployed_as.name)
            break
    findings += _untouched(architecture, reference, module, seed)
    return Row(architecture.name, architecture.source, parameters, tuple(findings), shared)


def _deploy(architecture: Architecture, module: nn.Module, url: str, seed: int, max_batch: int) -> Finding | None:
    """Deploy; return None, or why it was refused."""
    where = "deploy" if max_batch == 1 else f"deploy with max_batch {max_batch}"
    settings = {**SETTINGS, "max_batch": max_batch}
    inputs = architecture.inputs_at({}, seed)
    try:
        if architecture.saved is None:
            dynamic = architecture.dynamic
            overwinter.deploy(module, inputs, name=architecture.name, dynamic=dynamic, url=url, **settings)
        else:
            _deploy_saved(architecture.name, architecture.saved(module, inputs), url, settings)
    except (CallerError, AuthorError) as error:
        return refused(where, str(error))
    except Exception as error:  # noqa: BLE001 - anything else is a finding
        return Finding(where, "wrong", text=f"{type(error).__name__}: {error}")
    return None


def _deploy_saved(name: str, program: torch.export.ExportedProgram, url: str, settings: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.pt2"
        torch.export.save(program, path)
        chosen = Settings(**settings)
        deploy_agreed(agree(export_saved(path), chosen.max_batch), url, name=name, settings=chosen)


def _compare_answer(
    client: overwinter.Client, architecture: Architecture, reference: Callable[..., Any], sizes: Sizes, seed: int
) -> Finding:
    """Compare the node's answer with eager mode at these sizes."""
    where = " ".join(f"{name}={size}" for name, size in sizes.items()) or "as given"
    inputs = architecture.inputs_at(sizes, seed + 1)
    expected = eager(reference, inputs)
    try:
        given = _infer(client, architecture.name, inputs)
    except (CallerError, AuthorError) as error:
        found = refused(where, str(error))
        agreed = isinstance(expected, Exception) and found.verdict == "refused_clearly"
        return Finding(where, "equal", text=f"both refuse: {error}") if agreed else found
    except OverwinterError as error:
        return Finding(where, "wrong", text=f"{type(error).__name__}: {error}")
    if isinstance(expected, Exception):
        lines = str(expected).splitlines() or [""]
        return Finding(where, "wrong", text=f"answered, eager raises {type(expected).__name__}: {lines[0][:150]}")
    return judged(where, expected, typed(expected, given))


def _infer(client: overwinter.Client, name: str, inputs: Inputs) -> list[Tensor]:
    """Return a function's outputs in its order."""
    return [torch.as_tensor(array.copy()) for array in client.infer(name, inputs).values()]


def typed(expected: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Convert the answers to bfloat16 where expected: a client receives them as float32, exactly."""
    if len(expected) != len(given):
        return list(given)
    narrow = {torch.bfloat16: torch.bfloat16}
    return [have.to(narrow.get(want.dtype, have.dtype)) for want, have in zip(expected, given, strict=True)]


def _untouched(
    architecture: Architecture, reference: Callable[..., Any], module: nn.Module, seed: int
) -> list[Finding]:
    """Return a finding if the deploy changed the answers of the author's module."""
    inputs = architecture.inputs_at({}, seed + 1)
    before, after = eager(reference, inputs), eager(module, inputs)
    if isinstance(before, Exception) or isinstance(after, Exception):
        if type(before) is type(after):
            return []
        return [Finding("author's module", "wrong", text=f"after the deploy: {after!r:.200}")]
    found = judged("author's module", before, after)
    return [] if found.verdict == "equal" else [found._replace(verdict="wrong", text="changed by the deploy")]


def _compare_shared_runs(
    client: overwinter.Client, architecture: Architecture, reference: Callable[..., Any], seed: int
) -> Finding:
    """Compare each of many concurrent answers with the eager answer to that client alone."""
    if "batch" not in architecture.names:
        return Finding("shared", "equal", text="no batch")
    each = [architecture.inputs_at({"batch": 1 + caller % 2}, seed + 100 + caller) for caller in range(CALLERS)]
    before = _runs(client)
    with ThreadPoolExecutor(CALLERS) as pool:
        outcomes = list(pool.map(lambda inputs: _attempt(client, architecture.name, inputs), each))
    requests, runs = (after - at for after, at in zip(_runs(client), before, strict=True))
    findings = []
    for inputs, outcome in zip(each, outcomes, strict=True):
        expected = eager(reference, inputs)
        if isinstance(outcome, CallerError | AuthorError):
            continue  # Also refused alone, and reported there.
        if isinstance(outcome, Exception) or isinstance(expected, Exception):
            findings.append(Finding("shared", "wrong", text=f"{outcome!r:.200} for {expected!r:.100}"))
        else:
            findings.append(judged("shared", expected, typed(expected, outcome)))
    if not findings:
        return Finding("shared", "equal", text="all callers are refused")
    found = max(findings, key=lambda finding: (finding.verdict == "wrong", finding.difference))
    wrong = sum(finding.verdict == "wrong" for finding in findings)
    if wrong:
        return found._replace(text=f"{wrong} of {len(findings)} callers: {found.text}")
    return found._replace(text=f"{requests} requests in {runs} runs")


def _attempt(client: overwinter.Client, name: str, inputs: Inputs) -> list[Tensor] | Exception:
    try:
        return _infer(client, name, inputs)
    except OverwinterError as error:
        return error


def _runs(client: overwinter.Client) -> tuple[int, int]:
    """Return the number of requests that the node has run, and of runs."""
    text = client.metrics()
    found = [re.search(rf"^overwinter_{name} (\S+)$", text, re.MULTILINE) for name in METRICS]
    requests, runs = (int(float(value[1])) if value else 0 for value in found)
    return requests, runs

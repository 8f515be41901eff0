"""Deploys a model from the deployer's machine to a node.

The model is exported to a program and compared with it, its weights are packed into blocks, the missing blocks are
sent, and the manifest registers the function. PyTorch is needed here, but not in the node's daemon.
"""

import ast
import ctypes
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overwinter.api.arrays import to_tensor
from overwinter.api.client import Client
from overwinter.core.agreement import Agreement
from overwinter.core.errors import CallerError, HandlerError, ProgramError
from overwinter.core.function import Settings
from overwinter.core.ids import Address, FunctionName, TenantId
from overwinter.core.tensor import Buffer, TensorSpec
from overwinter.model.program import Program, encode_program
from overwinter.node import clock
from overwinter.store.blocks import address_of, build_block, name_block
from overwinter.store.manifest import Blob, Handler, Manifest, SampleTensor
from overwinter.store.packing import BlockPlan, pack

if TYPE_CHECKING:
    import torch

    from overwinter.model.agreement import Agreed
    from overwinter.model.arguments import Dynamic

DEFAULT_URL = "http://127.0.0.1:8000"
DEPLOY_TIMEOUT_S = 600.0
"""The longest wait for one answer to a deploy. It is long because the node answers after the trial of the version."""
RENEW_S = 60.0
"""The time after which an upload asks again which blobs are missing, so that the node keeps those that it has."""
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h)")
MS_OF = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6}

Sample = Mapping[str, Any] | tuple[SampleTensor, ...]
"""A request that a new function must answer: arrays, numbers or text by the input's name, or in a manifest's format."""
ReportBytes = Callable[[str, int, int], None]
"""Receives the name of the current step, the bytes done and the bytes in total."""


class Uploaded(msgspec.Struct, frozen=True):
    """The result of a deploy: the version, the bytes of the function, and how many of them were sent."""

    name: str
    version: int
    nbytes: int
    added_bytes: int
    warning: str = ""
    """What the author should know about the trial; empty if there is nothing."""


class Package(msgspec.Struct):
    """A function ready to be sent: its manifest, and for each of its blobs a callable that returns the bytes."""

    manifest: Manifest
    contents: dict[Address, Callable[[], Buffer]]

    def upload(
        self, client: Client, progress: ReportBytes | None = None, now: Callable[[], float] = clock.now
    ) -> Uploaded:
        """Send the blobs that the node does not hold for the function's tenant, also those that it removes meanwhile,
        and register the function; raise the node's error if it refuses.
        """
        client = client.for_tenant(self.manifest.tenant)
        blobs = {blob.address: blob for blob in self.manifest.blobs()}
        lacking, asked_at, sent = deque(client.missing(list(blobs))), now(), 0
        total = sum(blobs[address].nbytes for address in lacking)
        while lacking:
            address = lacking.popleft()
            client.put_block(address, self.contents[address]())
            sent += blobs[address].nbytes
            if progress is not None:
                progress("upload", min(sent, total), total)
            if now() - asked_at >= RENEW_S and sent <= 2 * total:
                # The node keeps blobs without a function only for a while after they were sent or asked for.
                lacking, asked_at = deque(client.missing(list(blobs))), now()
        registered = client.register(self.manifest)
        nbytes = sum(blob.nbytes for blob in blobs.values())
        return Uploaded(registered.name, registered.version, nbytes, total, registered.warning)


def package(  # noqa: PLR0913 - the parts of a function
    name: str,
    program: Program,
    weights: Sequence["torch.Tensor"],
    agreement: Agreement | None = None,
    *,
    handler: str | None = None,
    assets: Mapping[str, bytes] | None = None,
    samples: Sequence[Sample] = (),
    tenant: str = "default",
    settings: Settings | None = None,
) -> Package:
    """Return the package of a function: a program, its weights in the program's order, and optionally a handler.

    `samples` are requests that the function must answer before it is deployed: arrays, numbers or text by the input's
    name. Raises ProgramError when the settings let requests share runs, and `agreement` does not say that they may;
    HandlerError when the tensors that the handler declares cannot be read; CallerError for an invalid sample, or for
    assets without a handler.
    """
    if assets and handler is None:
        raise CallerError(f"a handler reads the assets {', '.join(map(repr, assets))}: give the handler too")
    chosen = settings or Settings()
    if chosen.max_batch > 1:
        _check_batching(chosen.max_batch, agreement)
    buffers = [bytes_of(weight) for weight in weights]
    contents: dict[Address, Callable[[], Buffer]] = {}
    blocks = []
    for plan in pack(program.weights):
        block = name_block(plan, buffers)
        contents[block.address] = _block_maker(plan, buffers, weights)
        blocks.append(block)
    code = None
    inputs, outputs = program.inputs, program.outputs
    if handler is not None:
        inputs = declared_inputs(handler, inputs)
        outputs = declared_tensors(handler, "OUTPUTS") or outputs
        files = {key: _blob(data, contents) for key, data in (assets or {}).items()}
        code = Handler(_blob(handler.encode(), contents), files)
    manifest = Manifest(
        name=FunctionName(name),
        tenant=TenantId(tenant),
        program=_blob(encode_program(program), contents),
        blocks=tuple(blocks),
        inputs=inputs,
        outputs=outputs,
        handler=code,
        settings=chosen,
        agreement=agreement,
        samples=tuple(sample_tensors(sample, inputs) for sample in samples),
    )
    return Package(manifest, contents)


def deploy(  # noqa: PLR0913 - the options of a deploy
    model: "torch.nn.Module",
    example_inputs: Any,
    *,
    name: str,
    dynamic: "Dynamic | None" = None,
    handler: str | Path | None = None,
    assets: Mapping[str, bytes] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    slo: str | float | None = None,
    tenant: str = "default",
    url: str = DEFAULT_URL,
    token: str | None = None,
    **settings: Any,
) -> Uploaded:
    """Deploy a module to a node and wait until its trial has passed.

    `example_inputs` is a tuple or a dict of tensors; `dynamic` names the dimensions that may vary, as `"sequence"` or
    with a range, `("sequence", 1, 8192)` (default: the first of every input is "batch"). `handler` is the path of a
    Python file, `assets` the files that it reads, `samples` requests that the function must answer in the trial, each a
    dict of its inputs, `slo` a latency such as "80ms", or a number of milliseconds; further settings are those of
    `Settings`, such as `device="pool"`. Raises ProgramError when the model cannot be exported or its program gives
    other answers, CallerError or HandlerError when another argument is wrong, and the node's error when it refuses.
    Warnings report sizes that had to be restricted, and what the trial on the node found.
    """
    # Importing PyTorch takes a second.
    from torch.nn import Module

    from overwinter.model.agreement import agree
    from overwinter.model.export import export

    if not isinstance(model, Module):
        raise CallerError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    chosen = settings_of(slo, settings)
    source = None if handler is None else read_source(Path(handler))
    return deploy_agreed(
        agree(export(model, example_inputs, dynamic), chosen.max_batch),
        url,
        token=token,
        name=name,
        handler=source,
        assets=assets,
        samples=samples,
        tenant=tenant,
        settings=chosen,
    )


def deploy_agreed(
    agreed: "Agreed", url: str, *, name: str, settings: Settings, token: str | None = None, **function: Any
) -> Uploaded:
    """Deploy a program that was compared with its model; `function` contains the arguments of `package`.

    Notes of the comparison and of the trial become warnings, at the line that called the caller.
    """
    for note in agreed.agreement.notes:
        warnings.warn(note, stacklevel=3)
    ready = package(name, *agreed, settings=settings, **function)
    with Client(url, DEPLOY_TIMEOUT_S, token=token) as client:
        deployed = ready.upload(client)
    if deployed.warning:
        warnings.warn(deployed.warning, stacklevel=3)
    return deployed


def settings_of(slo: str | float | None, settings: Mapping[str, Any]) -> Settings:
    """Parse settings from user input; CallerError names unknown settings and invalid values."""
    values = dict(settings)
    if slo is not None:
        values["slo_ms"] = milliseconds(slo)
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(Settings))
        raise CallerError(f"settings: {error}; there are {known}") from None


def milliseconds(duration: str | float) -> float:
    """A duration such as "80ms" or "1.5s" in milliseconds; an int or a float is in milliseconds already."""
    if not isinstance(duration, str):
        return float(duration)
    found = DURATION.fullmatch(duration.strip())
    if found is None:
        raise CallerError(f"{duration!r} is not a duration: write a number and one of {', '.join(MS_OF)}, as in 80ms")
    return float(found[1]) * MS_OF[found[2]]


def declared_tensors(source: str, name: str) -> tuple[TensorSpec, ...] | None:
    """The tensors that a handler's source lists under `name`, read without running it; None without such a list."""
    try:
        tree = ast.parse(source, "handler.py")
    except (SyntaxError, RecursionError, MemoryError) as error:
        # The text of a MemoryError is empty.
        text = str(error) or "an expression is nested too deeply"
        raise HandlerError(f"the handler is not valid Python: {text}") from None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            named: list[ast.expr] = [node.target]
            value = node.value
        elif isinstance(node, ast.Assign):
            named, value = node.targets, node.value
        else:
            continue
        if value is not None and any(isinstance(target, ast.Name) and target.id == name for target in named):
            try:
                return msgspec.convert(ast.literal_eval(value), tuple[TensorSpec, ...])
            except (ValueError, TypeError, RecursionError, MemoryError, msgspec.ValidationError) as error:
                form = '{"name": "text", "datatype": "BYTES", "shape": ["batch"]}'
                raise HandlerError(f"{name} of the handler must be a list of literals like {form}: {error}") from None
    return None


def declared_inputs(handler: str | None, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The tensors that a function takes: those that its handler lists, which may be none, or the program's. Raises
    HandlerError for an invalid handler.
    """
    declared = None if handler is None else declared_tensors(handler, "INPUTS")
    return inputs if declared is None else declared


def _check_batching(max_batch: int, agreement: Agreement | None) -> None:
    obstacle = "shared runs were not compared with separate runs" if agreement is None else agreement.batching.obstacle
    if obstacle:
        raise ProgramError(
            f"max_batch is {max_batch}, but requests to this model cannot share a run: {obstacle}; leave max_batch at 1"
        )


def sample_tensors(inputs: Sample, specs: Sequence[TensorSpec]) -> tuple[SampleTensor, ...]:
    """Return a request in the format of a manifest; raise CallerError."""
    if isinstance(inputs, tuple):
        return inputs
    known = {spec.name: spec for spec in specs}
    unknown = inputs.keys() - known
    if unknown:
        raise CallerError(f"sample: unknown input {min(unknown)!r}; the inputs are {', '.join(known) or 'none'}")
    tensors = [to_tensor(name, value, lambda name=name: known[name]) for name, value in inputs.items()]  # type: ignore[misc]
    return tuple(SampleTensor(each.name, each.datatype, each.shape, bytes(each.data)) for each in tensors)


def _blob(data: bytes, contents: dict[Address, Callable[[], Buffer]]) -> Blob:
    address = address_of(data)
    contents[address] = lambda: data
    return Blob(address, len(data))


def _block_maker(plan: BlockPlan, buffers: Sequence[Buffer], weights: Sequence["torch.Tensor"]) -> Callable[[], Buffer]:
    def make() -> Buffer:
        # The buffers point into the memory of the weights. The closure keeps the weights alive.
        assert len(weights) == len(buffers)
        return build_block(plan, buffers)

    return make


def read_source(path: Path) -> str:
    """Return the text of a file in UTF-8, whatever the locale, without the mark that some editors write before it;
    raise CallerError for another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CallerError(f"{path} is not UTF-8: {error}") from error


def bytes_of(weight: "torch.Tensor") -> memoryview:
    """Return the bytes of a tensor, which has no gaps, in their order in memory. They are not copied: the tensor must
    outlive them.
    """
    if not weight.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * weight.nbytes).from_address(weight.data_ptr())).cast("B")

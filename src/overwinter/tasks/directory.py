"""Opens a `transformers` directory for a deploy: as the raw program, or for a task with its handler.

A handler is tried before it is sent. It must read requests as `transformers` does, and items of one request, which are
padded to one length, must get the same answers as alone. Otherwise the deploy is refused, because a wrong answer is
worse.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import CallerError, ProgramError
from overwinter.model.export import Exported, export
from overwinter.model.pretrained import PlainModel, dynamic_of, load_model, load_transformers, read_json
from overwinter.tasks import image, speech, text
from overwinter.tasks.bundle import Bundle, TaskRequest, handler_source
from overwinter.worker.handler import Code, Handler
from overwinter.worker.values import Value

READING_TOLERANCE = 1e-5
"""The largest difference, apart from a last bit, between the inputs that a handler and `transformers` make from a
request.
"""
PADDING_TOLERANCE = 1e-3
"""The largest difference that padding may cause in an output: this number plus this share of the value; larger for
16-bit types.
"""


class Task(NamedTuple):
    """A kind of function that a directory can become."""

    bundle: Callable[[TaskRequest, Any], Bundle]
    head: str
    """What the name of the model's class must contain; empty for the model without a head."""
    files: dict[str, str]
    """The further files that the directory must contain, with the class of `transformers` that writes each."""
    options: tuple[str, ...]
    handlers: tuple[tuple[str, ...], ...]
    """The files of each handler that the function may have."""
    labelled: bool = True
    """Whether the names of the model's classes are needed."""

    def sources(self) -> list[str]:
        """Return the sources of the handlers that the function may have."""
        return [handler_source(*parts) for parts in self.handlers]


TOKENIZER = {"tokenizer.json": "AutoTokenizer"}
TASKS = {
    "text-classification": Task(
        text.classification,
        "ForSequenceClassification",
        TOKENIZER,
        ("top_k", "truncation", "sequence"),
        (("text", "classification"),),
    ),
    "token-classification": Task(
        text.entities,
        "ForTokenClassification",
        TOKENIZER,
        ("aggregation", "truncation", "sequence"),
        (("text", "entities"),),
    ),
    "feature-extraction": Task(
        text.features,
        "",
        TOKENIZER,
        ("pooling", "truncation", "sequence"),
        (("text", "features"), ("text", "embedding")),
        labelled=False,
    ),
    "image-classification": Task(
        image.classification,
        "ForImageClassification",
        {"preprocessor_config.json": "AutoImageProcessor"},
        ("top_k",),
        (("image", "classification"),),
    ),
    "automatic-speech-recognition": Task(
        speech.transcription,
        "ForCTC",
        {"vocab.json": "AutoTokenizer", "preprocessor_config.json": "AutoFeatureExtractor"},
        ("samples",),
        (("speech", "transcript"),),
        labelled=False,
    ),
}


class Directory(NamedTuple):
    """A model with the data for its export, and with a handler if it is opened for a task."""

    module: torch.nn.Module
    example_inputs: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]
    handler: str | None = None
    assets: Mapping[str, bytes] = {}
    samples: tuple[Mapping[str, Value], ...] = ()
    """Requests that the function must be able to answer."""


def check_task(task: str, options: Iterable[str]) -> None:
    """Raise CallerError for an unknown task or option."""
    if task not in TASKS:
        raise CallerError(f"there is no task {task!r}; the tasks: {', '.join(TASKS)}")
    known = TASKS[task].options
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise CallerError(f"{task} has no option {unknown[0]!r}; its options: {', '.join(known)}")


def open_directory(path: Path, task: str | None = None, options: Mapping[str, Any] | None = None) -> Directory:
    """Open the directory as a raw program, or as a function for a task.

    For a task, raise CallerError if it is unknown or an option is invalid. Raise ProgramError if the model cannot be
    opened with these options, if the directory lacks what the task needs, or if the handler fails or would answer
    otherwise than `transformers`.
    """
    given = dict(options or {})
    if task is None:
        return Directory(*load_transformers(path, given))
    check_task(task, given)
    _check_complete(path, task)
    model = load_model(path, headless=not TASKS[task].head)
    bundle = TASKS[task].bundle(TaskRequest(task, path, given), model)
    try:
        return _checked(bundle, PlainModel(model, first_only=True), fixed=set(given))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ProgramError(f"{type(model).__name__} cannot answer a sample of {task}: {error}") from error


def export_directory(directory: Directory) -> Exported:
    """Export the program and the weights; raise ProgramError, with any advice, if the model cannot be exported."""
    try:
        return export(directory.module, directory.example_inputs, directory.dynamic)
    except ProgramError as error:
        raise ProgramError(f"{error}{_advice(directory.dynamic)}") from error


def _check_complete(path: Path, task: str) -> None:
    """Raise ProgramError that names what the directory lacks, before the model is loaded."""
    config = read_json(path / "config.json")
    head, files = TASKS[task].head, TASKS[task].files
    [kind, *_] = config.get("architectures") or ["model without a class name"]
    if head not in kind:
        raise ProgramError(f"{path} contains a {kind}; {task} needs a class named ...{head}")
    for file, writer in files.items():
        if not (path / file).is_file():
            remedy = f'{writer}.from_pretrained("...").save_pretrained("{path}") of transformers writes it'
            raise ProgramError(f"{path} has no {file}, which {task} needs: {remedy}")
    if TASKS[task].labelled and "id2label" not in config:
        form = '"id2label": {"0": "negative", "1": "positive"}'
        raise ProgramError(
            f"config.json in {path} has no id2label, which {task} needs: name its classes there, as {form}"
        )


def _checked(bundle: Bundle, plain: PlainModel, fixed: set[str]) -> Directory:
    """Return the model with the handler, after trying both on the sample; raise ProgramError if they are wrong.
    `fixed`: dimensions with these names get the size of the sample only.
    """
    handler = Handler(Code(bundle.source), bundle.assets)
    takes = plain.takes() & bundle.axes.keys()
    items = [_item(bundle.sample, index) for index in range(len(bundle.expected))]
    with torch.inference_mode():
        for item, expected in zip(items, bundle.expected, strict=True):
            _check_reading(handler.preprocess(item), {name: expected[name] for name in sorted(takes)})
        inputs = {name: value for name, value in handler.preprocess(dict(bundle.sample)).items() if name in takes}
        together = plain(**inputs)
        for index, expected in enumerate(bundle.expected):
            _check_padding(plain, index, together, plain(**{name: expected[name] for name in takes}))
        handler.postprocess(together, dict(bundle.sample))
    # Tensors made in inference mode cannot be used in an export.
    examples = {name: value.clone() for name, value in inputs.items()}
    dynamic = dynamic_of(bundle.axes, {"batch", "sequence", "samples"} - fixed)
    return Directory(
        plain, examples, {name: dynamic[name] for name in examples}, bundle.source, bundle.assets, (bundle.sample,)
    )


def _advice(dynamic: Mapping[str, Mapping[int, str]]) -> str:
    """Advise how to export a model that cannot be exported for all sizes: fix the first size that is not a number of
    items.
    """
    names = [name for dims in dynamic.values() for at, name in dims.items() if at]
    return f"; the option {names[0]}=N deploys it for one size alone" if names else ""


def _item(sample: Mapping[str, Value], index: int) -> dict[str, Value]:
    return {name: value[index : index + 1] for name, value in sample.items()}


def _check_reading(read: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, wanted in expected.items():
        same = read[name].shape == wanted.shape and read[name].dtype == wanted.dtype
        # The last bit of a 16-bit type exceeds the tolerance, so allow for it.
        bits = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
        if not same or not torch.allclose(read[name], wanted, rtol=bits, atol=READING_TOLERANCE):
            raise ProgramError(
                f"transformers and the handler of this task compute different {name!r} from a sample; deploy the "
                "directory without a task and with a --handler"
            )


def _check_padding(
    plain: PlainModel, index: int, together: Mapping[str, torch.Tensor], alone: Mapping[str, torch.Tensor]
) -> None:
    for name, wanted in alone.items():
        row = together[name][index][tuple(slice(size) for size in wanted.shape[1:])]
        bound = max(PADDING_TOLERANCE, 8 * torch.finfo(wanted.dtype).eps)
        if not torch.allclose(row, wanted[0], rtol=bound, atol=bound, equal_nan=True):
            raise ProgramError(
                f"{type(plain.model).__name__} gives other outputs for an input that is padded: it ignores the mask; "
                "deploy the directory without a task"
            )

"""The models and requests of the demo, and the answers of plain PyTorch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import overwinter
from examples import crepe, crepe_handler, minilm, minilm_handler, mtcnn, variants, variants_handler
from examples.mtcnn_cascade import Array, Call, detect
from examples.pictures import astronaut
from overwinter.api.deployer import Uploaded, package, settings_of
from overwinter.model.export import Exported, export

FACES = ("pnet", "rnet", "onet")
SENTENCES = ("A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today.")
NOTES = (220.0, 277.18, 329.63)
"""An A major chord, in Hz."""
SILENCE = {"audio": torch.zeros(1, 2048)}


class Model(NamedTuple):
    """One function of the demo."""

    name: str
    module: nn.Module
    inputs: dict[str, torch.Tensor]
    """Example inputs for the export."""
    dynamic: dict[str, dict[int, str]]
    """The dynamic sizes of the inputs."""
    handler: ModuleType | None = None
    assets: Mapping[str, bytes] = {}
    samples: Sequence[Mapping[str, Any]] = ()
    """Requests for the trial. Without one the node generates a request, whose sizes may not suit the handler."""


def names() -> list[str]:
    """Return the names of all functions, in the order of `models`."""
    return ["minilm", "crepe-tiny", "crepe-full", *(f"mtcnn-{name}" for name in FACES), *_variant_names()]


def models() -> Iterator[Model]:
    """Create the functions one by one; raise MissingWeightsError if their weights are not installed."""
    body = minilm.load()
    yield Model("minilm", body, *minilm.inputs(), minilm_handler, minilm.assets())
    yield Model("crepe-tiny", *crepe.tiny(), crepe_handler, samples=[SILENCE])
    yield Model("crepe-full", *crepe.full(), crepe_handler, samples=[SILENCE])
    for name in FACES:
        yield Model(f"mtcnn-{name}", *getattr(mtcnn, name)())
    for index, name in enumerate(_variant_names()):
        yield Model(name, *variants.variant(index, body), variants_handler, variants.assets(index))


def deploy(model: Model, url: str, **settings: Any) -> Uploaded:
    """Export a model, send the blobs not sent before, and wait until the function has passed its trial."""
    return overwinter.deploy(
        model.module,
        model.inputs,
        name=model.name,
        dynamic=model.dynamic,
        handler=None if model.handler is None else model.handler.__file__,
        assets=model.assets,
        samples=model.samples,
        url=url,
        **settings,
    )


class Siblings:
    """Deploys models; those that differ only in the values of their weights share one export."""

    def __init__(self) -> None:
        self._exports: dict[object, Exported] = {}

    def deploy(self, model: Model, client: overwinter.Client, **settings: Any) -> Uploaded:
        """Deploy a model in two steps: make a package from a program and weights, then send it."""
        program, weights = self.export(model)
        source = None if model.handler is None else Path(str(model.handler.__file__)).read_text()
        ready = package(
            model.name,
            program,
            weights,
            handler=source,
            assets=model.assets,
            samples=model.samples,
            settings=settings_of(None, settings),
        )
        return ready.upload(client)

    def export(self, model: Model) -> Exported:
        """Return the program of the first such model, and the weights of this one in the program's order."""
        state = model.module.state_dict()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in state.items())
        key = (type(model.module), shapes)
        if key not in self._exports:
            self._exports[key] = export(model.module, model.inputs, model.dynamic)
        program = self._exports[key].program
        return Exported(program, [state[weight.name].contiguous() for weight in program.weights])


def plain(models: Mapping[str, Model]) -> Call:
    """Return a function that runs the models in this process, by name, with the author's own modules and handlers."""
    states: dict[str, object] = {}

    def call(name: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        model = models[name]
        inputs = {key: _from_array(array) for key, array in arrays.items()}
        if name not in states:
            states[name] = _state(model)
        with torch.inference_mode():
            prepared = _step(model, "preprocess")(inputs, states[name])
            outputs = _step(model, "postprocess")(model.module(**prepared), inputs, states[name])
        return {key: _to_array(value) for key, value in outputs.items()}

    return call


class Question(NamedTuple):
    """A question for one function, or for several that work together."""

    functions: tuple[str, ...]
    ask: Callable[[Call], tuple[str, ...]]
    """Sends the requests through a Call, and returns a text on the answer of each function."""


def questions() -> list[Question]:
    """Return the questions for all functions of the demo."""
    asked = [
        Question(("minilm",), _compare_sentences),
        Question(("crepe-tiny",), _hear_chord("crepe-tiny")),
        Question(("crepe-full",), _hear_chord("crepe-full")),
        Question(tuple(f"mtcnn-{name}" for name in FACES), _find_faces),
    ]
    tasks = variants.tasks().values()
    held_out = [(name, task.held_out.text) for name, task in zip(_variant_names(), tasks, strict=True)]
    return asked + [Question((name,), _classify(name, text)) for name, text in held_out]


def _compare_sentences(call: Call) -> tuple[str, ...]:
    first, same, other = call("minilm", {"text": np.array(SENTENCES, object)})["embedding"]
    return (f"eating ~ a meal {first @ same:.2f}, eating ~ stocks {first @ other:.2f}",)


def _hear_chord(name: str) -> Callable[[Call], tuple[str, ...]]:
    def ask(call: Call) -> tuple[str, ...]:
        audio = torch.cat([crepe.tone(hertz, frames=2) for hertz in NOTES]).numpy()
        heard = np.median(call(name, {"audio": audio})["pitch"], axis=1)
        notes = " ".join(f"{hertz:.0f}" for hertz in NOTES)
        return (f"{notes} Hz heard as " + " ".join(f"{hertz:.1f}" for hertz in heard),)

    return ask


def _find_faces(call: Call) -> tuple[str, ...]:
    seen = dict.fromkeys(FACES, 0)

    def counted(name: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        seen[name] += len(next(iter(arrays.values())))
        return call(f"mtcnn-{name}", arrays)

    faces = detect(astronaut(), counted)
    boxes = ", ".join(f"at {face.box.round().astype(int).tolist()}, {face.probability:.2%} sure" for face in faces)
    found = f"{len(faces)} face{'' if len(faces) == 1 else 's'}"
    return (
        f"a photograph in {seen['pnet']} sizes",
        f"{seen['rnet']} parts of it that may be faces",
        f"{seen['onet']} that look like it: {found} {boxes}",
    )


def _classify(name: str, text: str) -> Callable[[Call], tuple[str, ...]]:
    def ask(call: Call) -> tuple[str, ...]:
        (label,) = call(name, {"text": np.array([text], object)})["label"]
        return (f"{label.decode()}: {text}",)

    return ask


def _variant_names() -> list[str]:
    return [f"minilm-{name.replace('_', '-')}" for name in variants.tasks()]


def _state(model: Model) -> Any:
    """Return the state that the model's handler keeps between requests."""
    read = getattr(model.handler, "read_asset", lambda name, data: data)
    return _step(model, "setup")({name: read(name, data) for name, data in model.assets.items()})


def _step(model: Model, name: str) -> Callable[..., Any]:
    """Return a step of the model's handler, or one that changes nothing."""
    return getattr(model.handler, name, lambda first, *_: first)


def _from_array(array: Array) -> torch.Tensor | list[bytes]:
    return [text.encode() for text in array.tolist()] if array.dtype == object else torch.from_numpy(array)


def _to_array(value: torch.Tensor | list[bytes]) -> Array:
    return value.numpy() if isinstance(value, torch.Tensor) else np.array(value, object)

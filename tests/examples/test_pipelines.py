"""The example pipelines are valid, and MTCNN's three networks find a face when they are called as one."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

for needed in ("numpy", "safetensors", "tokenizers", "PIL"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e .[demo]")

from examples import demo_models, mtcnn  # noqa: E402
from examples.pictures import astronaut  # noqa: E402
from examples.pipelines import judge_handler, propose_handler  # noqa: E402
from examples.weights import INSTALL, weights_missing  # noqa: E402
from overwinter import deploy  # noqa: E402
from overwinter.core.pipeline import parse_pipeline  # noqa: E402
from tests.system.nodes import NodeProcess  # noqa: E402

FOLDER = Path(propose_handler.__file__).parent
FILES = sorted(FOLDER.glob("*.toml"))
STAGES: dict[str, tuple[Callable[[], Any], ModuleType, dict[str, bytes]]] = {
    "faces-propose": (mtcnn.pnet, propose_handler, {}),
    "faces-refine": (mtcnn.rnet, judge_handler, {"side": b"24\n"}),
    "faces-decide": (mtcnn.onet, judge_handler, {"side": b"48\n"}),
}
# The result of the published cascade, and the allowed distance in pixels for a pyramid that begins at larger faces.
FACE = [181.1, 62.2, 267.7, 172.1]
NEAR = 2.0

with_weights = pytest.mark.skipif(
    bool(weights_missing()), reason=f"packages with weights are not installed: {weights_missing()}: {INSTALL}"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_pipeline_is_valid_and_its_functions_exist(path: Path) -> None:
    pipeline = parse_pipeline(path.read_text())
    assert pipeline.name == path.stem
    known = {*demo_models.names(), *STAGES}
    assert {stage.function for stage in pipeline.stages.values()} <= known


def detect(image: torch.Tensor) -> torch.Tensor:
    """Compute the boxes of the three stages in this process."""
    inputs = {"image": image}
    for make, handler, assets in STAGES.values():
        state = handler.setup(assets) if assets else None
        with torch.inference_mode():
            outputs = make()[0](**handler.preprocess(inputs, state))
            inputs = {"image": image} | handler.postprocess(outputs, inputs, state)
    return inputs["boxes"]


@with_weights
def test_the_stages_find_the_one_face() -> None:
    [face] = detect(torch.from_numpy(astronaut())).tolist()
    assert face[:4] == pytest.approx(FACE, abs=NEAR)
    assert face[4] > 0.99


@with_weights
def test_the_stages_find_no_face_in_the_dark() -> None:
    assert detect(torch.zeros(60, 90, 3, dtype=torch.uint8)).shape == (0, 5)


@with_weights
def test_the_networks_called_as_one_pipeline_find_the_same_face(node: NodeProcess) -> None:
    picture, boxes = torch.zeros(60, 90, 3, dtype=torch.uint8), torch.tensor([[10.0, 10.0, 30.0, 30.0, 1.0]])
    for name, (make, handler, assets) in STAGES.items():
        module, example, dynamic = make()
        sample = {"image": picture, "boxes": boxes} if assets else {"image": picture}
        code = {"handler": handler.__file__, "assets": assets, "samples": [sample]}
        deploy(module, example, name=name, dynamic=dynamic, url=node.url, **code)
    node.client.deploy_pipeline(parse_pipeline((FOLDER / "faces.toml").read_text()))
    image = astronaut()
    found = node.client.infer("faces", {"image": image})["faces"]
    assert found == pytest.approx(detect(torch.from_numpy(image)).numpy(), abs=1e-3)
    assert node.client.infer("faces", {"image": image[:60, :90] // 16})["faces"].shape == (0, 5)

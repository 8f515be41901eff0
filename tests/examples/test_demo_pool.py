"""The demo's pool brings only what a device misses, and notices each answer that is not plain PyTorch's."""

import pytest

for needed in ("numpy", "safetensors", "tokenizers", "PIL"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e .[demo]")

import torch  # noqa: E402

from examples import crepe, crepe_handler, demo_pool, minilm, variants, variants_handler  # noqa: E402
from examples.demo_models import Model, Siblings  # noqa: E402
from examples.demo_node import running_node  # noqa: E402
from examples.demo_pool import CalledAlone, CalledTogether, PoolResult  # noqa: E402
from examples.demo_progress import Steps  # noqa: E402
from examples.demo_report import show_pool  # noqa: E402
from examples.weights import INSTALL, weights_missing  # noqa: E402
from overwinter import Client  # noqa: E402

pytestmark = pytest.mark.skipif(
    bool(weights_missing()), reason=f"packages with weights are not installed: {weights_missing()}: {INSTALL}"
)


@pytest.fixture(scope="module")
def models() -> list[Model]:
    """Two variants of MiniLM, the large CREPE, and a model that is not for the pool."""
    body = minilm.load()
    family = [
        Model(f"minilm-{index}", *variants.variant(index, body), variants_handler, variants.assets(index))
        for index in (0, 1)
    ]
    return [
        Model("crepe-full", *crepe.full(), crepe_handler),
        Model("crepe-tiny", *crepe.tiny(), crepe_handler),
        *family,
    ]


def test_the_variants_and_another_model_run_on_the_pool_without_handlers(models):
    chosen = demo_pool.pooled(models)
    assert [model.name for model in chosen] == ["pool-minilm-0", "pool-minilm-1", "pool-crepe-full"]
    assert all(model.handler is None and not model.assets for model in chosen)
    texts = [task.held_out.text for task in variants.tasks().values()]
    for model, text in zip(chosen[:2], texts, strict=False):
        assert torch.equal(model.inputs["input_ids"], variants.tokens([text])["input_ids"])


@pytest.mark.parametrize("wrong_at", [None, 0, demo_pool.LATER_REQUESTS])
def test_each_answer_is_compared_with_plain_pytorch(models, wrong_at):
    model = demo_pool.pooled(models)[0]
    expected = demo_pool.plain(model)
    asked = []

    def infer(name, arrays):
        asked.append(name)
        return {key: value + 1e-6 * (len(asked) - 1 == wrong_at) for key, value in expected.items()}

    took, agrees = demo_pool.call_alone(model, infer, expected)
    assert len(took) == len(asked) == 1 + demo_pool.LATER_REQUESTS
    assert agrees == (wrong_at is None)


def test_a_wrong_answer_is_shown_and_fails_the_demo(models, capsys):
    first, second, other = demo_pool.pooled(models)
    functions = [CalledAlone(each, 90_000_000, 1_000, 0.2, 0.1, each is not second) for each in (first, second, other)]
    trial = PoolResult(functions, CalledTogether(9, 2, 5_000, agrees=True))
    show_pool(trial)
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if "DIFFERS" in line]
    assert "1 more" in line
    assert not trial.agrees
    assert not PoolResult([], CalledTogether(9, 2, 5_000, agrees=False)).agrees


def test_a_variant_beside_its_sibling_brings_only_its_head(models, tmp_path):
    with running_node(tmp_path, "--port", "0", *demo_pool.OPTIONS, say=print) as node, Client(node.ready()) as client:
        trial = demo_pool.try_pool(Steps(), client, demo_pool.pooled(models), Siblings())
    first, second, other = trial.functions
    assert trial.agrees
    assert first.moved_bytes > 80_000_000
    assert 0 < second.moved_bytes < first.moved_bytes / 1000
    assert other.moved_bytes > 80_000_000
    assert trial.together.requests == demo_pool.ROUNDS * 3

"""all-MiniLM-L6-v2, a sentence embedding: BERT with 6 layers, mean pooling and normalisation in one module."""

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from examples.weights import weights_path

WIDTH = 384
HEADS = 12
LAYERS = 6
HIDDEN = 1536
VOCABULARY = 30522
POSITIONS = 512
EPSILON = 1e-12

Example = tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]]]

RENAMED = (
    ("embeddings.word_embeddings", "words"),
    ("embeddings.position_embeddings", "positions"),
    ("embeddings.token_type_embeddings", "segments"),
    ("embeddings.LayerNorm", "norm"),
    ("encoder.layer", "layers"),
    ("attention.self.", ""),
    ("attention.output.dense", "mix"),
    ("attention.output.LayerNorm", "mix_norm"),
    ("intermediate.dense", "widen"),
    ("output.dense", "narrow"),
    ("output.LayerNorm", "narrow_norm"),
)
"""Replacements that turn the published names into the module's, all applied in this order."""


class Layer(nn.Module):
    """Self-attention and a two-layer perceptron, each with a residual connection and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mix_norm = nn.LayerNorm(WIDTH, EPSILON)
        self.widen = nn.Linear(WIDTH, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, WIDTH)
        self.narrow_norm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.mix_norm(self.mix(mixed.transpose(1, 2).flatten(2)) + x)
        return self.narrow_norm(self.narrow(F.gelu(self.widen(x))) + x)


class MiniLM(nn.Module):
    """Maps token ids and mask, INT64 [batch, sequence of at most 512], to embeddings of norm 1, FP32 [batch, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"embedding": self.embed(input_ids, attention_mask)}

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the embedding, as input for a head."""
        positions = self.positions.weight[: input_ids.shape[1]]
        x = self.norm(self.words(input_ids) + self.segments.weight[0] + positions)
        mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        counted = attention_mask[:, :, None].to(x.dtype)
        mean = (x * counted).sum(1) / counted.sum(1)
        return F.normalize(mean, dim=1)


def load() -> MiniLM:
    """Load the published weights; raise MissingWeightsError if their package is not installed."""
    published = load_file(weights_path("minilm"))
    ours = {_rename(name): tensor for name, tensor in published.items() if not name.startswith("pooler.")}
    ours.pop("embeddings.position_ids", None)
    module = MiniLM()
    module.load_state_dict(ours, assign=True)
    return module.eval().requires_grad_(False)


def inputs() -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """Return example inputs of 2 sentences, the second one shorter, and their dynamic sizes."""
    ids = torch.arange(1000, 1032).reshape(2, 16)
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    sizes = {0: "batch", 1: "sequence"}
    return {"input_ids": ids, "attention_mask": mask}, {"input_ids": sizes, "attention_mask": sizes}


def model() -> Example:
    """The model for `overwinter deploy examples.minilm:model`."""
    return (load(), *inputs())


def assets() -> dict[str, bytes]:
    """The assets of examples/minilm_handler.py."""
    return {"tokenizer.json": weights_path("minilm-tokenizer").read_bytes()}


def _rename(name: str) -> str:
    for published, ours in RENAMED:
        name = name.replace(published, ours)
    return name

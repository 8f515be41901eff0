"""Networks from `transformers` with random weights, behind plain-tensor interfaces.

`transformers` takes seconds to import, so each function imports only what it builds.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as f

ATTENTION: dict[str, Any] = {"attn_implementation": "sdpa"}


class ImageLogits(nn.Module):
    """(batch, 3, height, width) images to (batch, classes) logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Classify a batch of images."""
        return self.model(pixel_values=image).logits


class TextModel(nn.Module):
    """(batch, sequence) token ids and their mask (1 token, 0 padding) to the named outputs of the model."""

    def __init__(self, model: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor for each name, in order."""
        answer = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(answer[name] for name in self.outputs)


class SentenceEmbedding(nn.Module):
    """(batch, sequence) token ids and their mask to (batch, width) embeddings with an L2 norm of 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the L2-normalized mean of the states of the real tokens."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return f.normalize((states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0), dim=1)


class NextToken(nn.Module):
    """(batch, sequence) token ids to (batch, vocabulary) logits of the token that follows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run one step of generation, without a cache."""
        return self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def resnet(depths: tuple[int, ...], small: bool) -> nn.Module:
    """ResNet with bottleneck blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "num_labels": 10}
    full: dict[str, Any] = {"num_labels": 1000}
    return ImageLogits(
        ResNetForImageClassification(ResNetConfig(depths=list(depths), **(sizes if small else full))),
    )


def efficientnet_b5(small: bool) -> nn.Module:
    """EfficientNet-b5: the default configuration is b7, so width and depth are given."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    # hidden_dim must be 1280 times the width; the model rounds it but does not derive it.
    sizes: dict[str, Any] = {"width_coefficient": 0.25, "hidden_dim": 320, "image_size": 64, "num_labels": 10}
    full: dict[str, Any] = {"width_coefficient": 1.6, "hidden_dim": 2048, "image_size": 456, "num_labels": 1000}
    config = EfficientNetConfig(depth_coefficient=2.2, dropout_rate=0.4, **(sizes if small else full))
    return ImageLogits(EfficientNetForImageClassification(config))


def mobilenet_v2(small: bool) -> nn.Module:
    """MobileNetV2 at width 1."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    sizes: dict[str, Any] = {"depth_multiplier": 0.25, "finegrained_output": False, "image_size": 64, "num_labels": 10}
    full: dict[str, Any] = {"num_labels": 1000}
    return ImageLogits(MobileNetV2ForImageClassification(MobileNetV2Config(**(sizes if small else full))))


def vit_base(small: bool) -> nn.Module:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_labels": 10,
    }
    full: dict[str, Any] = {"num_labels": 1000}
    return ImageLogits(ViTForImageClassification(ViTConfig(**ATTENTION, **(sizes if small else full))))


def bert_sizes(small: bool, **full: int) -> dict[str, Any]:
    """Keyword arguments of a BERT-like configuration; the depth stays as it is."""
    thin = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    return {**ATTENTION, **full, **(thin if small else {})}


def bert_base(small: bool) -> nn.Module:
    """BERT-base with its pooler: states of all tokens, and one of the sentence."""
    from transformers import BertConfig, BertModel

    return TextModel(BertModel(BertConfig(**bert_sizes(small))), "last_hidden_state", "pooler_output")


def bert_large(small: bool) -> nn.Module:
    """BERT-large for question answering, the papers' Bert-qa: where the answer starts and where it ends."""
    from transformers import BertConfig, BertForQuestionAnswering

    sizes = bert_sizes(small, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return TextModel(BertForQuestionAnswering(BertConfig(**sizes)), "start_logits", "end_logits")


def distilbert(small: bool) -> nn.Module:
    """DistilBERT: states of all tokens."""
    from transformers import DistilBertConfig, DistilBertModel

    thin: dict[str, Any] = {"vocab_size": 100, "dim": 32, "n_heads": 4, "hidden_dim": 64}
    return TextModel(DistilBertModel(DistilBertConfig(**ATTENTION, **(thin if small else {}))), "last_hidden_state")


def minilm(small: bool) -> nn.Module:
    """MiniLM, a BERT of 6 layers and width 384, as a sentence embedding."""
    from transformers import BertConfig, BertModel

    sizes = bert_sizes(small, hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
    return SentenceEmbedding(BertModel(BertConfig(**sizes), add_pooling_layer=False))


def gpt2(small: bool) -> nn.Module:
    """GPT-2 with 124 million parameters; the output layer is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    thin: dict[str, Any] = {
        "vocab_size": 100,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 99,
        "eos_token_id": 99,
    }
    return NextToken(GPT2LMHeadModel(GPT2Config(**ATTENTION, **(thin if small else {}))))


def llama_small(small: bool) -> nn.Module:
    """A Llama of 8 layers and width 512 with grouped-query attention, 55 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    full: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
    }
    thin: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=8, num_key_value_heads=2, **ATTENTION, **(thin if small else full))
    return NextToken(LlamaForCausalLM(config))

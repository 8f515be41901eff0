"""Small directories as written by `save_pretrained` of `transformers`: real architectures, random weights."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "quick", "fox", "came", "slow", "##ly", "to", "it", "works", "well", "winter", "snow", "!", "&"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WEATHER = {0: "rain", 1: "snow", 2: "sunshine"}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


def tokenizer(longest: int = 64) -> transformers.PreTrainedTokenizerBase:
    """Return a WordPiece tokenizer of a few words, which splits most other words into letters."""
    pieces = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    rules = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    rules.normalizer = normalizers.BertNormalizer(lowercase=True)
    rules.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rules.decoder = decoders.WordPiece()
    rules.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rules, model_max_length=longest, **named)


def named(labels: dict[int, str]) -> dict[str, object]:
    return {"id2label": labels, "label2id": {name: index for index, name in labels.items()}}


def text_directory(path: Path, kind: str, labels: dict[int, str] | None = None, tokens=None, **config) -> Path:
    """Write a text model; `kind` names its class, and the tokenizer above is the default."""
    torch.manual_seed(0)
    family = next(name for name in ("DistilBert", "Roberta", "Bert", "FNet", "Mamba") if kind.startswith(name))
    tokens = tokens or tokenizer()
    sizes = {"vocab_size": len(tokens) + 40, "max_position_embeddings": 70, "pad_token_id": 0, **SIZES}
    if family == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "vocab_size": len(tokens)}
    if family == "Mamba":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": len(tokens)}
    made = getattr(transformers, f"{family}Config")(**sizes, **(named(labels) if labels else {}), **config)
    _spread(getattr(transformers, kind)(made)).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def image_directory(path: Path, processor: object | None = None, **config) -> Path:
    """Write a ViT of 32 by 32 pixels."""
    torch.manual_seed(0)
    made = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, **named(WEATHER), **config)
    _spread(transformers.ViTForImageClassification(made)).save_pretrained(path)
    (processor or transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})).save_pretrained(path)
    return path


def speech_directory(path: Path, **config) -> Path:
    """Write a Wav2Vec2 of two convolutions and a vocabulary of letters."""
    torch.manual_seed(0)
    path.mkdir(parents=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ"]
    vocabulary = path / "letters.json"
    vocabulary.write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    transformers.Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(path)
    vocabulary.unlink()
    transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(path)
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    made = transformers.Wav2Vec2Config(**SIZES, **CONVOLUTIONS, **places, vocab_size=len(letters), **config)
    _spread(transformers.Wav2Vec2ForCTC(made)).save_pretrained(path)
    return path


def _spread(model: torch.nn.Module) -> torch.nn.Module:
    """Enlarge the initial weights, so that answers differ clearly between inputs."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    return model.eval()

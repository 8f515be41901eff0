"""Reads from a directory how a model of speech recognition normalizes audio, and the vocabulary of its tokenizer."""

import json
from typing import Any

import torch

from overwinter.core.errors import ProgramError
from overwinter.model.pretrained import DATA_ONLY, import_transformers
from overwinter.tasks.bundle import Bundle, TaskRequest, handler_source
from overwinter.worker.handler import Code, Handler

SAMPLE_S = 1.0
"""The length of the sample sounds, unless the option `samples` gives one."""


def transcription(request: TaskRequest, model: Any) -> Bundle:
    """Return the bundle of a function that returns the text of each recording, by greedy CTC decoding."""
    if model.main_input_name != "input_values":
        kind = type(model).__name__
        raise ProgramError(f"{request.task} needs a model of audio samples; {kind} takes {model.main_input_name}")
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(request.path, **DATA_ONLY)
        extractor = transformers.AutoFeatureExtractor.from_pretrained(request.path, **DATA_ONLY)
    except (OSError, ValueError, KeyError) as error:
        raise ProgramError(f"transformers cannot read {request.path}: {error}") from error
    state = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "normalize": bool(extractor.do_normalize),
        "tokens": tokenizer.convert_ids_to_tokens(list(range(model.config.vocab_size))),
        "blank": tokenizer.pad_token,
        "delimiter": getattr(tokenizer, "word_delimiter_token", None),
        "lower": bool(getattr(tokenizer, "do_lower_case", False)),
    }
    source, assets = handler_source("speech", "transcript"), {"task.json": json.dumps(state).encode()}
    _check_decoding(Handler(Code(source), assets), tokenizer, model.config.vocab_size)
    sample = _sounds(request.number("samples") or int(SAMPLE_S * extractor.sampling_rate))
    expected = [{"input_values": _extracted(extractor, row).to(model.dtype)} for row in sample]
    return Bundle(source, assets, {"audio": sample}, expected, {"input_values": ("batch", "samples")})


def _extracted(extractor: Any, row: torch.Tensor) -> torch.Tensor:
    extracted = extractor(row.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt")
    values: torch.Tensor = extracted["input_values"]
    return values


def _sounds(samples: int) -> torch.Tensor:
    """Create two rows of decaying tones and noise, one loud and one quiet."""
    source = torch.Generator().manual_seed(samples)
    time = torch.arange(samples) / 16_000
    tones = torch.stack([torch.sin(2 * torch.pi * pitch * time) * torch.exp(-3 * time) for pitch in (220.0, 330.0)])
    return (tones + 0.1 * torch.randn(2, samples, generator=source)) * torch.tensor([[0.5], [0.02]])


def _check_decoding(handler: Handler, tokenizer: Any, size: int) -> None:
    """Raise ProgramError unless the handler converts tokens with repeats, blanks and spaces as the tokenizer does."""
    source = torch.Generator().manual_seed(size)
    ids = torch.randint(0, size, (4, 60), generator=source).repeat_interleave(2, 1)
    ids[:, ::7] = tokenizer.pad_token_id
    logits = torch.nn.functional.one_hot(ids, size).float()
    texts = [text.decode() for text in handler.postprocess({"logits": logits}, {})["text"] if isinstance(text, bytes)]
    expected = [tokenizer.decode(row, skip_special_tokens=False) for row in ids.tolist()]
    if texts != expected:
        raise ProgramError(
            f"the tokenizer {type(tokenizer).__name__} converts tokens to text in another way than the handler; "
            "deploy the directory without a task and with a --handler"
        )

"""Reads the settings of a text task from a directory: its tokenizer, and the names of its classes."""

import json
from typing import Any

import torch

from overwinter.core.errors import CallerError, ProgramError
from overwinter.model.pretrained import DATA_ONLY, Axes, import_transformers
from overwinter.tasks.bundle import Bundle, TaskRequest, function_of_scores, handler_source, labels

SAMPLE = (
    "Winter comes slowly to the valley; the first snow falls on the hills, and the river is quiet.",
    "In 1905 Ada Müller, of 24 Bridge Street, paid £3.50 for a ticket to Zürich & never came back!",
    "It works.",
)
UNKNOWN_LENGTH = 1_000_000
"""A tokenizer without a maximum length reports a number above this one."""


def classification(request: TaskRequest, model: Any) -> Bundle:
    """Return the bundle of a function that returns the labels and scores of each text, all unless `top_k` is given."""
    names = labels(model)
    state = {"labels": names, "function": function_of_scores(model), "top_k": request.number("top_k") or len(names)}
    return _bundle(request, state, "classification", truncates=request.choice("truncation", (False, True)))


def entities(request: TaskRequest, model: Any) -> Bundle:
    """Return the bundle of a function that returns the tokens of each text that belong to an entity, with their labels;
    `aggregation=simple` merges adjacent tokens of one kind.
    """
    state = {"labels": labels(model), "aggregation": request.choice("aggregation", ("none", "simple"))}
    return _bundle(request, state, "entities", truncates=request.choice("truncation", (True, False)))


def features(request: TaskRequest, model: Any) -> Bundle:
    """Return the bundle of a function that returns a vector for each token, or with `pooling=mean` their mean."""
    part = "embedding" if request.choice("pooling", ("none", "mean")) == "mean" else "features"
    return _bundle(request, {}, part, truncates=request.choice("truncation", (False, True)))


def _bundle(request: TaskRequest, state: dict[str, Any], answer: str, *, truncates: bool) -> Bundle:
    tokenizer = _tokenizer(request)
    sequence = request.number("sequence")
    state |= {
        "pad": tokenizer.pad_token_id or 0,
        "pad_type": tokenizer.pad_token_type_id,
        "unknown": tokenizer.unk_token_id,
        "longest": _longest(request, tokenizer, sequence) if truncates else None,
        "truncation_side": tokenizer.truncation_side,
        "sequence": sequence,
    }
    rules = tokenizer.backend_tokenizer.to_str()
    assets = {"tokenizer.json": rules.encode(), "task.json": json.dumps(state).encode()}
    texts = [_shortened(text, tokenizer, sequence or tokenizer.model_max_length) for text in SAMPLE]
    cut = {"truncation": truncates, "max_length": state["longest"]}
    expected = [_tokens(tokenizer(text, return_tensors="pt", **cut), state) for text in texts]
    length = max(tensors["input_ids"].shape[1] for tensors in expected)
    if sequence is not None and length > sequence:
        # The export would fix the length of this sample, and the handler would pad texts to another one.
        raise CallerError(f"sequence={sequence} is too short for a word of the sample texts: give {length} or more")
    axes: dict[str, Axes] = dict.fromkeys(expected[0], ("batch", "sequence"))
    return Bundle(handler_source("text", answer), assets, {"text": [text.encode() for text in texts]}, expected, axes)


def _shortened(text: str, tokenizer: Any, longest: int) -> str:
    """Return as many words of the text as make at most `longest` tokens, but at least one."""
    words = text.split()
    while len(words) > 1 and len(tokenizer(" ".join(words), verbose=False)["input_ids"]) > longest:
        words.pop()
    return " ".join(words)


def _tokenizer(request: TaskRequest) -> Any:
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(request.path, **DATA_ONLY)
    except (OSError, ValueError, KeyError) as error:
        raise ProgramError(f"transformers cannot read the tokenizer in {request.path}: {error}") from error
    if not tokenizer.is_fast:
        raise ProgramError(f"the tokenizer {type(tokenizer).__name__} in {request.path} does not use tokenizer.json")
    return tokenizer


def _longest(request: TaskRequest, tokenizer: Any, sequence: int | None) -> int | None:
    longest: int = tokenizer.model_max_length
    if sequence is not None:
        return min(longest, sequence)
    if longest < UNKNOWN_LENGTH:
        return longest
    if request.options.get("truncation"):
        raise CallerError(
            f"truncation needs a maximum length: set model_max_length in {request.path}/tokenizer_config.json"
        )
    return None


def _tokens(encoded: Any, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tokenizer's own tensors, padded as the program takes them."""
    fillers = {"input_ids": state["pad"], "attention_mask": 0, "token_type_ids": state["pad_type"]}
    tensors: dict[str, torch.Tensor] = {name: encoded[name] for name in fillers if name in encoded}
    missing = (state["sequence"] or 0) - tensors["input_ids"].shape[1]
    if missing <= 0:
        return tensors
    return {name: torch.nn.functional.pad(t, (0, missing), value=fillers[name]) for name, t in tensors.items()}

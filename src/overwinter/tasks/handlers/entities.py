"""Writes entities: the labels of the tokens of a text, as JSON. task.json: labels, unknown, aggregation."""

import json
from typing import Any

import torch

OUTPUTS = [{"name": "entities", "datatype": "BYTES", "shape": ["batch"]}]

OUTSIDE = "O"
"""The label of tokens outside of any entity."""


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, list[bytes]], state: dict[str, Any]
) -> dict[str, list[bytes]]:
    """Convert logits [batch, tokens, classes] to one JSON list per text, as the pipeline of transformers does."""
    scores = outputs["logits"].float().softmax(2)
    answers = []
    for content, row in zip(inputs["text"], scores, strict=True):
        entities = tagged(content.decode(), row, state)
        if state["aggregation"] == "simple":
            entities = grouped(entities, state)
        found = [each for each in entities if each.get("entity", each.get("entity_group")) != OUTSIDE]
        answers.append(json.dumps(found, ensure_ascii=False).encode())
    return {"entities": answers}


def tagged(text: str, scores: torch.Tensor, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the likeliest label of each token that stands for a part of the text."""
    tokens = state["tokenizer"].encode(text)
    best, labels = scores[: len(tokens.ids)].max(1)
    entities = []
    for index, (score, label) in enumerate(zip(best.tolist(), labels.tolist(), strict=True)):
        if tokens.special_tokens_mask[index]:
            continue
        start, end = tokens.offsets[index]
        word = text[start:end] if tokens.ids[index] == state["unknown"] else tokens.tokens[index]
        entity = {"entity": state["labels"][label], "score": score, "index": index, "word": word}
        entities.append({**entity, "start": start, "end": end})
    return entities


def grouped(entities: list[dict[str, Any]], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Merge adjacent tokens of one kind into one entity; a label that begins with B- begins another one."""
    groups: list[list[dict[str, Any]]] = []
    for entity in entities:
        continues = bool(groups) and not entity["entity"].startswith("B-")
        if continues and kind(entity) == kind(groups[-1][-1]):
            groups[-1].append(entity)
        else:
            groups.append([entity])
    return [merged(group, state) for group in groups]


def kind(entity: dict[str, Any]) -> str:
    """Return the label without its B- or I- prefix."""
    label: str = entity["entity"]
    return label[2:] if label.startswith(("B-", "I-")) else label


def merged(group: list[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    """Return one entity for the tokens in a group."""
    words = [entity["word"] for entity in group]
    decoder = state["tokenizer"].decoder
    return {
        "entity_group": group[0]["entity"].split("-", 1)[-1],
        "score": sum(entity["score"] for entity in group) / len(group),
        "word": " ".join(words) if decoder is None else decoder.decode(words),
        "start": group[0]["start"],
        "end": group[-1]["end"],
    }

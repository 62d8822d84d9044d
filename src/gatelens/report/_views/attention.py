"""Attention on the page: patterns of whole prompts, and the strongest pairs of tokens of a head."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from gatelens.gates import LEVELS
from gatelens.measures.example import PROMPT_SOURCES, ExamplePrompt
from gatelens.model.components import Component
from gatelens.report._summary import Entry, Group

_STEPS = 65535  # an attention weight is sent to the page as a whole number of 1/65535
_PAIRS = 3  # pairs of tokens of each head, for the last token and for all others
_LEAST_WEIGHT = 0.005  # weaker pairs are not worth showing


def attention_views(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """What can be chosen in the attention viewer, and the patterns of each choice, which the page loads later.

    Runs at several levels have the same prompts, so the attention of a model on a task is included once, with what the
    circuit of each level predicts.

    Returns:
        The views, and for each view the patterns of its prompts.
    """
    views: list[dict[str, Any]] = []
    patterns: list[list[dict[str, Any]]] = []
    seen: dict[tuple[str, str, str], dict[str, Any]] = {}
    for group in groups:
        for entry in group.entries:
            prompts = entry.run.prompts
            if not prompts:
                continue
            key = (group.task, entry.label, "\n".join("\t".join(prompt.tokens) for prompt in prompts))
            if key in seen:
                _add_predictions(seen[key], group, entry, prompts)
                continue
            layers, heads = prompts[0].attention.shape[:2]
            seen[key] = {
                "task": group.task,
                "label": entry.label,
                "layers": layers,
                "heads": heads,
                "sparse": entry.result.sparse,
                "without": [],  # why runs have no predictions
                "prompts": [
                    {
                        "tokens": prompt.tokens,
                        "answer": prompt.answer,
                        "wrong": prompt.record.wrong,
                        "predictions": [],
                    }
                    for prompt in prompts
                ],
            }
            _add_predictions(seen[key], group, entry, prompts)
            views.append(seen[key])
            patterns.append([_pattern(prompt) for prompt in prompts])
    return views, patterns


def strongest_pairs(prompts: Sequence[ExamplePrompt], name: str) -> list[list[Any]]:
    """The strongest pairs of tokens of a head in the first prompt: [query, key, weight], those of the last query first.

    The first token is not shown as a key, because most heads attend to it when they have nothing to do.
    """
    component = Component.find(name)
    if not prompts or component is None or component.kind != "H":
        return []
    prompt = prompts[0]
    attention = prompt.attention[component.layer, component.index].float()
    visible = torch.ones_like(attention).tril().bool()
    if prompt.open is not None:
        visible &= prompt.open[component.layer, component.index]
    weights = attention * visible
    weights[:, 0] = 0
    n_tokens, last = len(weights), len(weights) - 1
    last_keys = weights[last].topk(min(_PAIRS, n_tokens)).indices.tolist()
    weights[last] = 0
    others = weights.flatten().topk(min(_PAIRS, weights.numel())).indices.tolist()
    pairs = [(last, key) for key in last_keys] + [divmod(place, n_tokens) for place in others]
    return [
        [prompt.tokens[query], prompt.tokens[key], round(float(attention[query, key]), 4)]
        for query, key in pairs
        if key > 0 and visible[query, key] and attention[query, key] > _LEAST_WEIGHT
    ]


def _add_predictions(view: dict[str, Any], group: Group, entry: Entry, prompts: Sequence[ExamplePrompt]) -> None:
    """Add what the model predicts with the group's circuit alone and without it; with everything, once.

    If the run has no predictions, the reason is added instead.
    """
    noun = LEVELS[group.level].noun
    if not any(prompt.record.parts for prompt in prompts):
        view["without"].append(f"{noun}, {group.method}: {_why_no_predictions(entry.result.settings.source)}")
    for shown, prompt in zip(view["prompts"], prompts, strict=True):
        size = noun if prompt.record.size is None else f"{prompt.record.size:,} {noun}"
        for part in prompt.record.parts:
            is_everything = part.part == prompt.record.parts[0].part
            if is_everything and shown["predictions"]:
                continue
            name = part.part if is_everything else f"{part.part}: {size}, {group.method}"
            shown["predictions"].append({**part.model_dump(mode="json"), "part": name})


def _why_no_predictions(source: str) -> str:
    if source in PROMPT_SOURCES:
        return "this run was saved by an earlier version, without the probabilities of answers."
    return (
        f"no probabilities of answers, because closed gates read the source {source}, which is made from many prompts "
        f"and not for one; a run with the source {' or '.join(PROMPT_SOURCES)} has them."
    )


def _pattern(prompt: ExamplePrompt) -> dict[str, str | None]:
    """Attention weights (layer, head, pair) as uint16 in steps of 1/65535, and open edges as bytes, both in base64.

    A pair is a query and a key that is not after it: (0, 0), (1, 0), (1, 1), (2, 0), ...
    """
    length = len(prompt.tokens)
    queries, keys = torch.tril_indices(length, length)
    weights = (prompt.attention[..., queries, keys].float().clamp(0, 1) * _STEPS).round().to(torch.int32)
    opened = None if prompt.open is None else prompt.open[..., queries, keys].numpy().astype("u1").tobytes()
    return {
        "weights": base64.b64encode(weights.numpy().astype("<u2").tobytes()).decode(),
        "open": None if opened is None else base64.b64encode(opened).decode(),
    }

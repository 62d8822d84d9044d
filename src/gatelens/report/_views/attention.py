"""Attention on the page: patterns of whole prompts, and the strongest pairs of tokens of a head."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from gatelens.measures.example import ExamplePrompt
from gatelens.model.components import Component
from gatelens.report._summary import Group

_STEPS = 65535  # an attention weight is sent to the page as a whole number of 1/65535
_PAIRS = 3  # pairs of tokens of each head, for the last token and for all others
_LEAST_WEIGHT = 0.005  # weaker pairs are not worth showing


def attention_views(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """What can be chosen in the attention viewer, and the patterns of each choice, which the page loads later.

    Runs at several levels have the same prompts, so the attention of a model on a task is included once.

    Returns:
        The views, and for each view the patterns of its prompts.
    """
    views: list[dict[str, Any]] = []
    patterns: list[list[dict[str, Any]]] = []
    seen: set[tuple[str, str]] = set()
    for group in groups:
        for entry in group.entries:
            tokens = "\n".join("\t".join(prompt.tokens) for prompt in entry.run.prompts)
            if not entry.run.prompts or (entry.label, tokens) in seen:
                continue
            seen.add((entry.label, tokens))
            layers, heads = entry.run.prompts[0].attention.shape[:2]
            views.append(
                {
                    "label": f"{entry.label}, {group.task}",
                    "layers": layers,
                    "heads": heads,
                    "sparse": entry.result.sparse,
                    "best": _best_head(groups, entry.label, group.task),
                    "prompts": [{"tokens": prompt.tokens, "answer": prompt.answer} for prompt in entry.run.prompts],
                }
            )
            patterns.append([_pattern(prompt) for prompt in entry.run.prompts])
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


def _best_head(groups: Sequence[Group], label: str, task: str) -> int:
    """The head to show first, as layer * heads + head: the one with the largest score for the task, or the first."""
    for group in sorted(groups, key=lambda group: group.level != "heads"):
        if group.task == task and label in group.head_scores:
            return int(group.head_scores[label].abs().argmax())
    return 0


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

"""Look at one head on one prompt: where every position looks, and how much each position could write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention_runs import attention_patterns, capture_attention
from gatelens.gates.interventions import gate_mask, tokens_of
from gatelens.measures.example import token_texts
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.runtime.shown import Shown
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks.base import CircuitTask


@dataclass(frozen=True, eq=False, repr=False)
class HeadAttention(Shown):
    """The attention of one head on one prompt.

    Arguments:
        head: the head.
        tokens: the prompt, token by token.
        roles: the token role of each position; None for a text that does not belong to a task.
        weights: the softmax over all visible keys; in a sparse model also where the gate is closed.
        value_norms: the length of v_j W_O: what the key's value adds to the residual stream if it gets all attention.
        open: where the gates of a sparse model are open; None for a dense model.

    Example:
        seen = gatelens.attention(model, "Mary and John went home. John gave a book to", "L9H6")
        seen.tokens[int(seen.weights[-1].argmax())]  # where the last token looks
        seen.plot()
    """

    model: str
    head: Head
    tokens: tuple[str, ...]
    roles: tuple[str, ...] | None
    weights: Float[Tensor, "query key"]
    value_norms: Float[Tensor, " key"]
    open: Bool[Tensor, "query key"] | None

    drawn_by = "gatelens.report.plots:plot_attention"

    def headline(self) -> str:
        return f"{self.head} in {self.model}: {''.join(self.tokens)}"

    def looks_at(self, query: int = -1, most: int = 5) -> list[tuple[int, str, float]]:
        """The keys that one query attends to most: (position, token, weight), closed keys left out.

        Arguments:
            query: the position that looks; by default the last one.
            most: how many keys.
        """
        if not -len(self.tokens) <= query < len(self.tokens):
            raise GatelensError(f"no position {query}: the prompt has {len(self.tokens)} tokens.")
        weights = self.weights[query] if self.open is None else self.weights[query] * self.open[query]
        best = weights.argsort(descending=True, stable=True)[:most].tolist()
        return [(key, self.tokens[key], float(weights[key])) for key in best if weights[key] > 0]

    def records(self) -> list[dict[str, Any]]:
        """One record for each visible pair of query and key."""
        length = len(self.tokens)
        pairs = [(query, key) for query in range(length) for key in range(query + 1)]
        return [
            {
                "query": query,
                "query_token": self.tokens[query],
                "key": key,
                "key_token": self.tokens[key],
                "weight": float(self.weights[query, key]),
                "value_norm": float(self.value_norms[key]),
                **({} if self.roles is None else {"query_role": self.roles[query], "key_role": self.roles[key]}),
                **({} if self.open is None else {"open": bool(self.open[query, key])}),
            }
            for query, key in pairs
        ]


def attention(model: Model, text: str | Tensor | CircuitTask, head: Any, *, prompt: int = 0) -> HeadAttention:
    """The attention of one head on a text or on a prompt of a task.

    Arguments:
        text: a text, tokens (1, position), or a task, whose clean prompts are meant.
        head: the head, such as ``"L9H6"`` or ``(9, 6)``.
        prompt: the number of the prompt, if a task is given.

    Returns:
        Its attention weights, the norms of its values, and which gates are open. Cost: 2 forwards of the prompt.

    Example:
        gatelens.attention(model, task, "L9H6").looks_at()  # [(2, " Mary", 0.71), ...]
    """
    is_edges, mask = gate_mask(model, head)
    if is_edges or mask.sum() != 1:
        raise GatelensError(f"{head!r} is not one head: write it as 'L3H7' or (3, 7).")
    [[layer, index]] = mask.nonzero().tolist()
    tokens, roles = _prompt(model, text, prompt)
    weights, edges = attention_patterns(model, tokens)
    values = capture_attention(model, tokens).values[layer][0, index].float()
    block = model.anatomy.blocks[layer]
    written = values @ model.anatomy.out_weight(block)[index].to(values)
    return HeadAttention(
        model.name,
        Head(layer, index),
        token_texts(model, tokens[0]),
        roles,
        weights[0, layer, index].float(),
        torch.linalg.vector_norm(written, dim=-1).cpu(),
        edges[0, layer, index] if is_sparse(model.hf) else None,
    )


def _prompt(model: Model, text: str | Tensor | CircuitTask, prompt: int) -> tuple[Tensor, tuple[str, ...] | None]:
    """The tokens (1, position) and, of a task, the roles of their positions."""
    if not isinstance(text, CircuitTask):
        tokens = tokens_of(model, text)
        if len(tokens) != 1:
            raise GatelensError(f"these are {len(tokens)} prompts: give one.")
        return tokens, None
    for bucket in text.buckets:
        place = (bucket.which == prompt).nonzero()
        if len(place):
            at = int(place[0, 0])
            roles = tuple(text.role_names[role] for role in text.roles(bucket)[at].tolist())
            return bucket.clean[at : at + 1], roles
    raise GatelensError(f"no prompt {prompt} in {text.name}: it has {len(text)} prompts, counted from 0.")

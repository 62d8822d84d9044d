"""Run a model with gates on its attention edges.

The attention edge (layer, head, query, key) is the contribution p_ij v_j to the head's output z_i. A gate of 0 removes
it or replaces it by the p_ij v_j of the corrupt run; nothing is renormalised. This module computes attention itself, in
the plain way that exposes p, through transformers' attention interface; the model's own mask decides which keys are
visible. In a sparse model a closed edge does not exist: its p is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from gatelens.errors import GatelensError
from gatelens.gates.alone import Done, run_attention_until
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import forward, gradient_numbers, only_last_position, repeat
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.sparse.attention_interface import edge_gates
from gatelens.sparse.in_model import is_sparse

_NAME = "gatelens-edges"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps weights p (run, head, query, key), a mask of edges of the same shape, and values (run, head, key, dim) to z."""


@dataclass(frozen=True, eq=False)
class AttentionRun:
    """The attention of one plain run."""

    weights: Sequence[Float[Tensor, "prompt head query key"]]  # p of each layer
    values: Sequence[Float[Tensor, "prompt head key dim"]]  # v of each layer, minus the head's rest value if it has one
    edges: Bool[Tensor, "prompt layer head query key"]  # visible and, in a sparse model, open
    logits: Float[Tensor, "prompt vocab"]  # at the last position


@torch.no_grad()
def capture_attention(model: Model, tokens: Int[Tensor, "prompt position"]) -> AttentionRun:
    """A plain run with all attention weights and values. Cost: 1 forward, and memory of (T, T) for each head."""
    weights: list[Tensor] = []
    values: list[Tensor] = []
    edges: list[Tensor] = []

    def keep(p: Tensor, exists: Tensor, v: Tensor) -> Tensor:
        weights.append(p)
        values.append(v)
        edges.append(exists.expand_as(p).cpu())
        return p @ v

    with Hooks() as hooks:
        _intercept(model, hooks, [keep] * model.n_layers)
        logits = forward(model, tokens, None, hooks, "last")
    return AttentionRun(weights, values, torch.stack(edges, 1), logits)


def attention_patterns(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """All attention weights of a plain run and where edges exist: (prompt, layer, head, query, key), on the CPU.

    The weights are those of the softmax over all visible keys, in a sparse model also where the gate is closed.
    Cost: 1 forward.
    """
    return _patterns(model, tokens, lambda x: x)


def attention_of_query(model: Model, tokens: Tensor, query: int = -1) -> tuple[Tensor, Tensor]:
    """The attention of one query, as in `attention_patterns`: (prompt, layer, head, key), on the CPU.

    Memory grows with the length of the prompts and not with its square, except for the layer that runs. Cost: 1
    forward.
    """
    return _patterns(model, tokens, lambda x: x[..., query, :])


@torch.no_grad()
def _patterns(model: Model, tokens: Tensor, part: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A part of the attention weights and edges of each layer: (prompt, layer, head, ...), on the CPU."""
    weights: list[Tensor] = []
    edges: list[Tensor] = []

    def keep(p: Tensor, exists: Tensor, v: Tensor) -> Tensor:
        edges.append(part(exists.expand_as(p)).cpu())
        return p @ v

    with Hooks() as hooks:
        _intercept(model, hooks, [keep] * model.n_layers, before_gates=lambda p: weights.append(part(p).cpu()))
        forward(model, tokens, None, hooks, "last")
    return torch.stack(weights, 1), torch.stack(edges, 1)


def run_attention(
    model: Model,
    tokens: Int[Tensor, "prompt position"],
    gates: Shaped[Tensor, "row ..."],
    source: AttentionRun | None = None,
    *,
    context: Context | None = None,
) -> Float[Tensor, "row prompt vocab"]:
    """Logits at the last position under each row of gates. Cost for each row: 1 forward with plain attention.

    Arguments:
        gates: (row, prompt, layer, head, query, key), where the prompt axis may have size 1. A gate of 1 gives the
            contribution of this run, a gate of 0 that of the source. Gates may require gradients.
        source: the run that closed gates read; with None, a closed gate contributes nothing.
        context: its memory budget decides how many rows run together.
    """
    length = tokens.shape[1]
    shape = (model.n_layers, model.n_heads, length, length)
    is_expected = gates.ndim == 6 and tuple(gates.shape[2:]) == shape and gates.shape[1] in (1, len(tokens))
    if not is_expected or len(gates) == 0:
        raise GatelensError(
            f"attention gates of {model.name} for {len(tokens)} prompts of {length} tokens must have the shape (row, "
            f"{len(tokens)}, {', '.join(map(str, shape))}), that is (row, prompt, layer, head, query, key), and not "
            f"{tuple(gates.shape)}."
        )
    grad = gates.requires_grad and torch.is_grad_enabled()
    numbers = learned_attention_numbers(model, length) if grad else attention_numbers(model, length)
    at_once = (context or Context()).fits(len(tokens) * numbers)
    with torch.set_grad_enabled(grad):
        return torch.cat([_run_rows(model, tokens, part, source) for part in gates.split(at_once)])


def attention_numbers(model: Model, length: int) -> int:
    """How many numbers a run holds for one row and one prompt: gates, and the weights and streams of a few layers."""
    gates = (model.n_layers + 6) * model.n_heads * length**2
    return gates + 24 * length * model.anatomy.width + 2 * int(model.hf.config.vocab_size)


def learned_attention_numbers(model: Model, length: int) -> int:
    """How many numbers a run whose gates require gradients holds for one row and one prompt."""
    return attention_numbers(model, length) + 2 * gradient_numbers(model, length)


@torch.no_grad()
def weights_from(
    model: Model, tokens: Int[Tensor, "prompt position"], layer: int, projected: Sequence[Tensor], rows: int
) -> Float[Tensor, "_ head query key"]:
    """The attention weights of one layer, computed from these projections (see `run_attention_until`).

    Returns:
        (row * prompt, head, query, key), 0 where an edge is hidden or closed.
    """
    weights: list[Tensor] = []

    def keep(p: Tensor, _: Tensor, __: Tensor) -> Tensor:
        weights.append(p)
        raise Done

    with Hooks() as hooks:
        _intercept(model, hooks, [keep] * model.n_layers)
        run_attention_until(model, tokens, layer, projected, rows, hooks)
    return weights[0]


def _run_rows(model: Model, tokens: Tensor, gates: Tensor, source: AttentionRun | None) -> Tensor:
    rows = len(gates)

    def gated(layer: int) -> Attend:
        def attend(p: Tensor, _: Tensor, v: Tensor) -> Tensor:
            g = gates[:, :, layer].expand(-1, len(tokens), -1, -1, -1).flatten(0, 1).to(p)
            z = (g * p) @ v
            if source is not None:
                z += ((1 - g) * repeat(source.weights[layer], rows)) @ repeat(source.values[layer], rows)
            return z

        return attend

    with Hooks() as hooks:
        _intercept(model, hooks, [gated(layer) for layer in range(model.n_layers)])
        if not torch.is_grad_enabled() and bool((gates != 1).any()):
            only_last_position(model, hooks)
        return forward(model, tokens, None, hooks, "last", rows).unflatten(0, (rows, -1))


def _intercept(
    model: Model, hooks: Hooks, attends: Sequence[Attend], before_gates: Callable[[Tensor], None] | None = None
) -> None:
    """Replace p @ v in the attention of each layer.

    Arguments:
        hooks: restores the model's own attention when its block ends.
        attends: what computes z instead, for each layer.
        before_gates: is called with the softmax of each layer, before the gates of a sparse model are applied.
    """
    config = model.hf.config
    own, sparse = config._attn_implementation, is_sparse(model.hf)
    config._attn_implementation = _NAME
    hooks.callback(setattr, config, "_attn_implementation", own)
    for block, attend in zip(model.anatomy.blocks, attends, strict=True):
        block.attention.interception = _Interception(attend, sparse, before_gates)  # type: ignore[assignment]
        hooks.callback(delattr, block.attention, "interception")


@dataclass(frozen=True, eq=False)
class _Interception:
    """What an attention module carries while this module computes its attention."""

    attend: Attend
    sparse: bool
    before_gates: Callable[[Tensor], None] | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain softmax attention with the signature of transformers. The mask is additive and never None."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    interception: _Interception = module.interception  # type: ignore[assignment]
    edges, rest = (attention_mask == 0).expand_as(scores), None
    p = torch.softmax(scores + attention_mask, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query)
    if interception.before_gates is not None:
        interception.before_gates(p)
    if interception.sparse:
        opened = edge_gates(module, scores, edges)
        edges, rest = opened.edges, opened.rest
        p = p * edges
    if rest is None:
        return interception.attend(p, edges, value).transpose(1, 2).contiguous(), None
    # z = rest + sum over open keys of p (v - rest): an edge carries p (v - rest), and the rest value belongs to no edge
    z = rest[:, None] + interception.attend(p, edges, value - rest[:, None])
    return z.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, eager_mask)

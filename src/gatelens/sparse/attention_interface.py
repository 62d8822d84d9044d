"""What transformers calls in the attention modules of a sparse model.

Importing this module registers gated attention with transformers under the name "gatelens".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gatelens.errors import GatelensError
from gatelens.sparse._head_gates import HeadOffset, gate_of, gates_of, has_gates_on, take_offsets
from gatelens.sparse.gated_attention import gated_attention
from gatelens.sparse.recording import OpenRecord, generators
from gatelens.sparse.saved_gates import NAME


@dataclass(frozen=True, eq=False)
class EdgeGates:
    """The gates of one attention module in one forward pass, for code that computes attention itself."""

    edges: Bool[Tensor, "batch head query key"]  # visible and open
    rest: Float[Tensor, "head dim"] | None  # z_i = rest + sum over open j of p_ij (v_j - rest); None is 0


def edge_gates(
    module: Any, scores: Float[Tensor, "batch head query key"], visible: Bool[Tensor, "batch _ query key"]
) -> EdgeGates:
    """Say which edges of a sparse model's attention module are open, in a forward pass that is under way.

    Call it once from an attention function whose registered name starts with "gatelens": offsets are only computed for
    these.

    Arguments:
        scores: scaled and soft-capped, not masked.
        visible: True for a visible pair.
    """
    gates = gates_of(module)
    of_queries, of_keys = take_offsets(module)
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if gates.gate == "probability":
        logits = logits.masked_fill(~visible, -torch.inf).log_softmax(-1)
    logits = logits + gates.bias.to(logits)[:, None, None]
    if of_queries is not None and of_keys is not None:
        logits = logits + of_queries.to(logits)[..., :, None] + of_keys.to(logits)[..., None, :]
    return EdgeGates(visible & (logits > 0), None if gates.rest is None else gates.rest.to(scores))


def offset_modules(module: Any) -> tuple[HeadOffset, HeadOffset] | None:
    """The modules that compute the offsets of queries and of keys, if this attention module calls them now.

    Each reads the input of the attention module, (batch, token, width), and returns (batch, token, head). They are
    called before the projections, in this order. Code that gives each head an input of its own can replace their
    outputs, as it replaces those of the projections. Score gates have no offsets, nor has a model without gates.
    """
    in_use = gate_of(module) == "probability" and has_gates_on(module)
    return (module.gate_query, module.gate_key) if in_use else None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention module; returns (batch, query, head, dim)."""
    for unknown in ("position_bias", "s_aux"):
        if kwargs.get(unknown) is not None:
            raise GatelensError(f"{type(module).__name__} needs `{unknown}`, which gated attention does not have.")
    gates = gates_of(module)
    of_queries, of_keys = take_offsets(module)
    causal = attention_mask is None and (module.is_causal if is_causal is None else is_causal)
    if causal and query.shape[2] > 1:
        # Without a mask the queries are the first tokens of the cache: the rest of a static one is still empty.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        of_keys = None if of_keys is None else of_keys[..., : query.shape[2]]
    record: OpenRecord | None = getattr(module, "gate_record", None)
    attention = gated_attention(
        query,
        key,
        value,
        gates.bias,
        causal=causal,
        sample=module.training,
        gate=gates.gate,
        query_offset=of_queries,
        key_offset=of_keys,
        rest=gates.rest,
        temperature=getattr(module, "gate_temperature", 1.0),
        scale=scaling,
        softcap=softcap,
        mask=attention_mask,
        generator=generators(module) if module.training else None,
        straight_through=getattr(module, "gate_straight_through", False),
        return_open=record is not None and record.wants_edges,
    )
    if record is not None:
        record.add(module.layer_idx, attention)
    return attention[0].transpose(1, 2).contiguous(), None


def _mask(
    q_length: int, q_offset: int | Tensor = 0, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The mask of sdpa, in which padded queries see nothing either: otherwise their edges would be counted."""
    mask: Tensor | None = sdpa_mask(q_length=q_length, q_offset=q_offset, attention_mask=attention_mask, **kwargs)
    if mask is None or attention_mask is None:
        return mask
    queries = torch.arange(q_length, device=attention_mask.device) + q_offset
    return mask & attention_mask[:, queries].bool()[:, None, :, None]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)

"""Gated attention, plainly: whole (query, key) matrices in float64, differentiated by autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gatelens.sparse._noise import hash_uniform, noise_integers


@dataclass(frozen=True)
class Plain:
    """What the operator returns: z, the expected share, the gates as used, and l > 0 for visible pairs."""

    z: Tensor
    expected_open: Tensor
    gates: Tensor
    open: Tensor
    chances: Tensor  # sigmoid(l / temperature), 0 for a hidden pair


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: float | Tensor,
    visible: Tensor,
    *,
    gate: str = "score",
    query_offset: Tensor | None = None,
    key_offset: Tensor | None = None,
    rest: Tensor | None = None,
    temperature: float = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    noise: Tensor | None = None,
    straight_through: bool = False,
) -> Plain:
    """The definition, line by line. visible: (batch, head, query, key); noise: logit(U) of the same shape."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    # A query that sees nothing has no softmax: its log p is set to 0 before it can become NaN, and p to 0 after.
    sees = visible.any(-1, keepdim=True)
    log_p = torch.log_softmax(s.masked_fill(~visible & sees, -math.inf), -1)
    p = torch.where(visible, log_p.exp(), 0.0)

    logits = torch.where(visible, log_p, 0.0) if gate == "probability" else s
    logits = logits + (bias[..., None, None] if isinstance(bias, Tensor) else bias)
    if query_offset is not None:
        logits = logits + query_offset[..., :, None]
    if key_offset is not None:
        logits = logits + key_offset[..., None, :]
    logits = logits / temperature
    noisy = logits if noise is None else logits + noise
    gates = (noisy > 0).to(s.dtype)
    if noise is not None or straight_through:
        soft = torch.sigmoid(noisy)
        gates = gates + (soft - soft.detach())

    r = torch.zeros(q.shape[1], v.shape[-1], dtype=v.dtype) if rest is None else rest
    z = (p * gates) @ v + (p * (1 - gates)).sum(-1, keepdim=True) * r[:, None]
    chances = torch.sigmoid(logits) * visible
    expected = chances.sum((-1, -2)) / visible.sum((-1, -2)).clamp(min=1)
    return Plain(z, expected, (noisy > 0) & visible, (logits > 0) & visible, chances)


def noise_of(seed: int, shape: tuple[int, int, int, int], kv_heads: int) -> Tensor:
    """The logistic noise that gated_attention draws from a generator with this seed, for all pairs."""
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)
    integers = noise_integers((batch, kv_heads, heads // kv_heads), queries, keys, torch.device("cpu"), generator)
    full = (batch, kv_heads, heads // kv_heads, queries, keys)
    scratch = (torch.empty(full, dtype=torch.int32) for _ in range(2))
    uniform = hash_uniform(*integers, torch.empty(full, dtype=torch.float64), *scratch)
    return torch.logit(1 - uniform).view(shape)

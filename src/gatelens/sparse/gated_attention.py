"""Attention whose edges are gated: the operator that sparse post-training trains.

With s the scaled (and, where asked, soft-capped) score of a query-key pair and b the gate bias of its head,

    y = (softmax(s over all visible keys) * A) v      not renormalised after gating
    A = 1[s + b > 0]                                  inference (sample=False)
    A = 1[s + b + logit(U) > 0]                       training (sample=True), U uniform on (0, 1)

Gradients. Training is straight through: backward takes A for sigmoid(s + b + logit(U)). Inference has the true
derivative: a step is flat almost everywhere, so softmax, values and `expected_open` carry gradient, A does not.

Cost. About one softmax attention. A block of queries meets all the keys that it sees at once; backward computes the
block again. So memory is linear in the sequence length, and keys that no query of a block sees (past the causal
diagonal, outside the window) cost nothing. Gate noise is not stored either: the noise of an edge is a hash of a random
integer of its query and one of its key.

Draye, Lei, Pan, Posner, Schölkopf: Sparse attention post-training for mechanistic interpretability, arXiv 2512.05865.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatelens.errors import GatelensError
from gatelens.sparse.blocks import LARGEST_BIAS, Blocks, Setting, Sight, flat, noise_integers


class GatedAttention(tuple[Tensor, Tensor, Tensor | None]):
    """`(y, expected_open, open_edges)`, and two more numbers as attributes.

    open_share: (batch, head), share of visible pairs with s + b > 0, whether or not gates were drawn; no gradient.
    pairs: (batch, head), the number of visible pairs, of which the shares are shares.
    """

    open_share: Tensor
    pairs: Tensor


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: float | Tensor = 0.0,
    causal: bool = True,
    sample: bool = False,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    return_open: bool = False,
) -> GatedAttention:
    """Attend through gates, as defined at the top of this file.

    q: (batch, head, query, dim); k, v: (batch, kv_head, key, dim), kv_head divides head (grouped-query attention).
    bias: added to the score in the gate only; a float, or a tensor that broadcasts to (batch, head), may be learned.
    causal: the queries are the last tokens of the keys (right for decoding with a cache) and see no later key.
    sample: draw the gates, from `generator` (or one for each row of the batch), else from torch's global generator.
    scale: of q.k, 1/sqrt(dim) by default. softcap: scores become softcap * tanh(score / softcap).
    window: with causal, a query sees this many keys, itself included.
    padding: (batch, key), true for a real token. A padded token is not seen and, with causal, sees nothing.
    mask: boolean, true for a visible pair, broadcasts to (batch, head, query, key). Restricts further.
    return_open: return the gates too, in memory quadratic in the sequence length.

    Returns (y, expected_open, open_edges); `GatedAttention` has more.
    y: (batch, head, query, dim) in the dtype of q, computed in float32 or better. 0 where a query sees no key.
    expected_open: (batch, head), mean of sigmoid(s + b) over visible pairs, 0..1; gradient to q, k and bias.
    open_edges: boolean (batch, head, query, key), the gates A of visible pairs as they were used, or None.
    """
    _check(q, k, v, causal, window, padding, mask)
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    groups = (kv_heads, heads // kv_heads)
    if mask is not None:
        broadcast("mask", mask, (batch, heads, queries, keys))
        mask = mask[(None,) * (4 - mask.ndim)].expand(-1, -1, queries, keys)  # what rows or heads share stays shared
        mask = mask.unflatten(1, groups if mask.shape[1] == heads else (1, 1))
    setting = Setting(
        scale=dim**-0.5 if scale is None else scale,
        softcap=softcap,
        sight=Sight(queries, keys, causal, window, None if padding is None else padding.bool(), mask),
        noise=noise_integers((batch, *groups), queries, keys, q.device, generator) if sample else None,
    )
    dtype = torch.promote_types(q.dtype, torch.float32)
    bias = torch.as_tensor(bias, dtype=dtype, device=q.device).clamp(-LARGEST_BIAS, LARGEST_BIAS)
    bias = broadcast("bias", bias, (batch, heads)).unflatten(1, groups)
    with torch.autocast(q.device.type, enabled=False):  # scores stay in float32 under mixed precision
        y, expected, share, pairs, edges = _Gated.apply(q.unflatten(1, groups), k, v, bias, setting, return_open)  # type: ignore[no-untyped-call]
    result = GatedAttention((y.flatten(1, 2), expected.flatten(1), edges.flatten(1, 2) if return_open else None))
    result.open_share, result.pairs = share.flatten(1), pairs.flatten(1)
    return result


class _Gated(torch.autograd.Function):
    """The operator on tensors with the axes of `attention_blocks`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, setting: Setting, return_open: bool) -> Any:
        blocks = Blocks(q, k, v, bias, setting)
        batch, kv_heads, group, queries, _ = q.shape
        # Token-major memory: a model puts the heads of a token side by side next, which is then free.
        y = q.new_zeros(batch, queries, kv_heads, group, v.shape[-1]).permute(0, 2, 3, 1, 4)
        expected = torch.zeros_like(bias)
        opened, pairs = torch.zeros(2, *bias.shape, dtype=torch.int64, device=q.device)
        edges = q.new_zeros(*q.shape[:-1], k.shape[-2], dtype=torch.bool) if return_open else None

        for rows in blocks.rows():
            pairs += rows.pairs
            for heads in blocks.heads(rows):
                block = blocks.compute(rows, heads)
                opened[heads] += block.opened
                expected[heads] += block.chance.sum((-1, -2))
                if edges is not None:
                    edges[heads][..., rows.queries, rows.keys] = block.gate > 0
                passed = block.weight.mul_(block.gate)
                y[heads][..., rows.queries, :] = torch.bmm(flat(passed), block.v).view(*passed.shape[:-1], -1)

        counted = pairs.clamp(min=1)
        share = opened / counted
        ctx.setting = setting
        ctx.save_for_backward(q, k, v, bias, counted)
        ctx.mark_non_differentiable(share, pairs, *([] if edges is None else [edges]))
        return y, expected / counted, share, pairs, edges

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dexpected: Tensor, *_: Any) -> Any:
        q, k, v, bias, counted = ctx.saved_tensors
        blocks = Blocks(q, k, v, bias, ctx.setting)
        dq, dk, dv, dbias = (torch.zeros_like(x) for x in (q, blocks.k, blocks.v, bias))
        dchance = (dexpected / counted)[..., None, None]

        for rows in blocks.rows():
            for heads in blocks.heads(rows):
                block = blocks.compute(rows, heads)
                dy_rows = flat(dy[heads][..., rows.queries, :].to(bias.dtype))
                # 1. y = passed v, where passed = weight * gate
                passed = block.gate.mul_(block.weight)
                dv[heads][..., rows.keys, :].flatten(0, 1).baddbmm_(flat(passed).mT, dy_rows)
                dpassed = blocks.product("dpassed", dy_rows, block.v).view_as(passed)
                # 2. the softmax
                dscores = passed.mul_(dpassed)
                dscores.addcmul_(block.weight, dscores.sum(-1, keepdim=True), value=-1)
                # 3. the gates: their chances in expected_open and, where they were drawn, straight through
                slope = blocks.soft_slope(block)
                dlogits = block.chance.addcmul_(block.chance, block.chance, value=-1).mul_(dchance[heads])
                if slope is not None:
                    dlogits.addcmul_(slope, block.weight.mul_(dpassed))
                dbias[heads] += dlogits.sum((-1, -2))
                # 4. the scores
                dscores.add_(dlogits)
                if block.tanh is not None:
                    dscores.addcmul_(dscores, block.tanh.square_(), value=-1)
                dq_rows = torch.bmm(flat(dscores), block.k).mul_(ctx.setting.scale)
                dq[heads][..., rows.queries, :] = dq_rows.view(*dscores.shape[:-1], -1)
                dk[heads][..., rows.keys, :].flatten(0, 1).baddbmm_(flat(dscores).mT, block.q)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dbias, None, None


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, padding: Tensor | None, mask: Tensor | None
) -> None:
    """One sentence for what would otherwise fail far from its cause, or not fail at all."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or q[:, 0, 0].shape != k[:, 0, 0].shape:
        raise GatelensError(f"q, k and v should be (batch, head, token, dim) and fit together, not {shapes}.")
    if q.shape[1] % k.shape[1]:
        raise GatelensError(f"the number of kv heads should divide the number of heads: {shapes}.")
    if causal and q.shape[2] > k.shape[2]:
        raise GatelensError(f"causal queries are the last tokens of the keys, so there cannot be more: {shapes}.")
    if window is not None and (window < 1 or not causal):
        raise GatelensError("a window should be at least 1 and needs causal=True; use mask= for other patterns.")
    if padding is not None and (padding.shape != (k.shape[0], k.shape[2]) or padding.is_floating_point()):
        raise GatelensError(f"padding should be true for real tokens and of shape {(k.shape[0], k.shape[2])}.")
    if mask is not None and mask.dtype != torch.bool:
        raise GatelensError(f"mask should be boolean, true for a visible pair, not {mask.dtype}.")


def broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x as a view of this shape."""
    try:
        return x.expand(shape)
    except RuntimeError as error:
        raise GatelensError(f"{name} should broadcast to {shape}, and {tuple(x.shape)} does not.") from error

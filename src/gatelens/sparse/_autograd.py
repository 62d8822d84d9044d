"""Forward and backward pass of gated attention, tile by tile. `gated_attention` defines what is computed.

With p the attention weight, A the gate and l the gate logit of an edge, the passes are

    z_i = r + sum over j of A_ij p_ij (v_j - r)          for a query that sees a key, else 0
    dM_ij = dz_i . (v_j - r)                             the derivative by A_ij p_ij
    dl_ij = slope_ij p_ij dM_ij + sigmoid'(l_ij) dE_i    slope: of the soft gate; E_i: expected number of open keys;
                                                         both are divided by the temperature, if it is not 1
    ds_ij = g_ij - p_ij (sum over k of g_ik)             with g = A p dM + dl, as log p has the softmax's derivative;
                                                         where gates see the score, dl is added to ds instead
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatelens.sparse._tiles import HeadRange, Options, QueryRange, Tile, Tiling, merge_heads


class GatedAttentionFunction(torch.autograd.Function):
    """The operator on tensors with the axes of `_tiles`; rest is (kv_head, group, dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_offset: Tensor,
        key_offset: Tensor | None,
        rest: Tensor | None,
        options: Options,
        return_open: bool,
    ) -> Any:
        """Returns z, the expected and the actual number of open keys and that of visible keys of each query, gates."""
        tiling = Tiling(q, k, v, query_offset, key_offset, options)
        batch, kv_heads, group, queries, _ = q.shape
        # Token-major memory: a model next puts the heads of a token side by side, which is then a view.
        z = q.new_zeros(batch, queries, kv_heads, group, v.shape[-1]).permute(0, 2, 3, 1, 4)
        expected, closed_mass = torch.zeros_like(query_offset), torch.zeros_like(query_offset)
        opened, visible = torch.zeros(2, *query_offset.shape, dtype=torch.int64, device=q.device)
        edges = q.new_zeros(*q.shape[:-1], k.shape[-2], dtype=torch.bool) if return_open else None

        for span in tiling.query_ranges():
            visible[..., span.queries] = span.visible
            closed_mass[..., span.queries] = (span.visible > 0).to(closed_mass)
            for heads in tiling.head_ranges(span):
                tile = tiling.compute(span, heads)
                opened[heads][..., span.queries] = tile.open_keys
                expected[heads][..., span.queries] = tile.chance.sum(-1)
                if edges is not None:
                    edges[heads][..., span.queries, span.keys] = tile.gate > 0
                passed = tile.weight.mul_(tile.gate)
                out = torch.bmm(merge_heads(passed), tile.v).view(*passed.shape[:-1], -1)
                if rest is not None:
                    closed = closed_mass[heads][..., span.queries].sub_(passed.sum(-1))
                    out.addcmul_(closed[..., None], rest[heads[1], :, None])
                z[heads][..., span.queries, :] = out

        ctx.options = options
        ctx.save_for_backward(q, k, v, query_offset, key_offset, rest, None if rest is None else closed_mass)
        ctx.mark_non_differentiable(opened, visible, *([] if edges is None else [edges]))
        return z, expected, opened, visible, edges

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, dexpected: Tensor, *_: Any) -> Any:
        q, k, v, query_offset, key_offset, rest, closed_mass = ctx.saved_tensors
        tiling = Tiling(q, k, v, query_offset, key_offset, ctx.options)
        gradients = _Gradients(tiling, dz, dexpected, rest)
        for span in tiling.query_ranges():
            for heads in tiling.head_ranges(span):
                gradients.add(span, heads, tiling.compute(span, heads))
        drest = None
        if rest is not None:
            drest = torch.einsum("bkgq,bkgqd->kgd", closed_mass, dz.to(closed_mass)).to(rest)
        dk, dv = gradients.dk.to(k.dtype), gradients.dv.to(v.dtype)
        return gradients.dq, dk, dv, gradients.dquery_offset, gradients.dkey_offset, drest, None, None


class _Gradients:
    """The gradients of everything but the rest value, summed over tiles."""

    def __init__(self, tiling: Tiling, dz: Tensor, dexpected: Tensor, rest: Tensor | None) -> None:
        self.tiling, self.dz, self.dexpected = tiling, dz, dexpected
        self.dz_rest = None if rest is None else torch.einsum("bkgqd,kgd->bkgq", dz.to(rest), rest)
        self.dq, self.dk, self.dv = (torch.zeros_like(x) for x in (tiling.q, tiling.k, tiling.v))
        self.dquery_offset = torch.zeros_like(tiling.query_offset)
        self.dkey_offset = None if tiling.key_offset is None else torch.zeros_like(tiling.key_offset)

    def add(self, span: QueryRange, heads: HeadRange, tile: Tile) -> None:
        tiling, options = self.tiling, self.tiling.options
        queries, keys = span.queries, span.keys
        dz = merge_heads(self.dz[heads][..., queries, :].to(tiling.dtype))
        # 1. z = passed (v - rest), where passed = weight * gate
        passed = tile.gate.mul_(tile.weight)
        self.dv[heads][..., keys, :].flatten(0, 1).baddbmm_(merge_heads(passed).mT, dz)
        dpassed = tiling.product("dpassed", dz, tile.v).view_as(passed)
        if self.dz_rest is not None:
            dpassed.sub_(self.dz_rest[heads][..., queries, None])
        # 2. The gates: through the expected number of open keys and, where they are straight through, through z
        dweight = passed.mul_(dpassed)
        slope = tiling.soft_slope(tile)
        dlogits = tile.chance.addcmul_(tile.chance, tile.chance, value=-1)
        dlogits.mul_(self.dexpected[heads][..., queries, None])
        if slope is not None:
            dlogits.addcmul_(slope, dpassed.mul_(tile.weight))
        if options.temperature != 1:
            dlogits.div_(options.temperature)
        self.dquery_offset[heads][..., queries] = dlogits.sum(-1)
        if self.dkey_offset is not None:
            self.dkey_offset[heads][..., keys] += dlogits.sum(-2)
        # 3. The softmax, and the scores that gates see
        if options.probability:
            dweight.add_(dlogits)
        dscores = dweight.addcmul_(tile.weight, dweight.sum(-1, keepdim=True), value=-1)
        if not options.probability:
            dscores.add_(dlogits)
        if tile.tanh is not None:
            dscores.addcmul_(dscores, tile.tanh.square_(), value=-1)
        # 4. The projections
        dq = torch.bmm(merge_heads(dscores), tile.k).mul_(options.scale)
        self.dq[heads][..., queries, :] = dq.view(*dscores.shape[:-1], -1)
        self.dk[heads][..., keys, :].flatten(0, 1).baddbmm_(merge_heads(dscores).mT, tile.q)

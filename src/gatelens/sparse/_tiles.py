"""Gated attention cut into tiles: the attention weights and gates of some queries, all keys that they see, some heads.

`gated_attention` defines the operator. A tile is small enough to stay in the processor's cache. All tiles of a pass are
computed in the same scratch memory, because allocating memory for each tile would cost more than the arithmetic.

Axes: q is (batch, kv_head, group, query, dim), where group counts the query heads that share a KV head; k and v are
(batch, kv_head, key, dim), and the scores of a tile are (batch, kv_head, group, query, key).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gatelens.sparse._noise import hash_uniform
from gatelens.sparse._visibility import Visibility

# Added to the score of a hidden pair: its weight and its gate are then exactly 0. The number is finite because minus
# infinity would give NaN for a query that sees no key. No bias or offset may come near it.
HIDDEN = -1e30
LARGEST_OFFSET = 1e28
# How many scores a tile has at most, and how many rows the matrix product has that computes them. A CPU is fast while
# few scores stay in its cache; other devices are fast with much work at once.
TILE_SIZE = {"cpu": 1 << 17}
TILE_SIZE_ELSEWHERE = 1 << 24
PRODUCT_ROWS = 128

HeadRange = tuple[slice, slice]  # some sequences of the batch, some KV heads


@dataclass(frozen=True)
class Options:
    """What forward and backward share besides the tensors with gradients."""

    scale: float
    softcap: float | None
    probability: bool  # whether gates see log p instead of the score
    temperature: float  # divides the gate logit
    straight_through: bool  # whether gradients pass through gates that are not sampled
    visibility: Visibility
    noise: tuple[Tensor, Tensor] | None  # see `noise_integers`; None if gates are not sampled


@dataclass(frozen=True)
class QueryRange:
    """Consecutive queries and the keys that they see."""

    queries: slice
    keys: slice
    penalty: Tensor  # (batch, kv_head, group or 1, query, last keys): added to the scores of the last keys
    visible: Tensor  # number of visible keys, broadcasts to (batch, kv_head, group, query)


@dataclass(frozen=True)
class Tile:
    """The attention of some queries in some heads. From `weight` on, the tensors are scratch memory."""

    q: Tensor  # (batch * kv_head, group * query, dim), scaled
    k: Tensor  # (batch * kv_head, key, dim)
    v: Tensor
    open_keys: Tensor  # (batch, kv_head, group, query): number of keys whose gate logit is positive
    weight: Tensor  # p, the softmax of the scores
    chance: Tensor  # sigmoid(logit / temperature): the probability that a sampled gate is open
    gate: Tensor  # A, 0.0 or 1.0
    uniform: Tensor | None  # 1 - U: a sampled gate is open where this is below its chance
    tanh: Tensor | None  # tanh(score / softcap)


class Tiling:
    """Cuts the problem into tiles and computes them.

    Arguments:
        query_offset: (batch, kv_head, group, query), the bias of the head included; its dtype is the one computed in.
        key_offset: (batch, kv_head, group, key) or None.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, query_offset: Tensor, key_offset: Tensor | None, options: Options
    ) -> None:
        self.dtype = query_offset.dtype
        self.q, self.k, self.v = q, k.to(self.dtype).contiguous(), v.to(self.dtype).contiguous()
        self.query_offset, self.key_offset, self.options = query_offset, key_offset, options
        self.batch, self.kv_heads, self.group, self.queries, _ = q.shape
        keys = k.shape[2]
        # Short sequences are cut into four ranges too, so that most pairs above the causal diagonal are skipped.
        self._step = min(max(PRODUCT_ROWS // self.group, 16), max(self.queries // 4, 32), max(self.queries, 1))
        self._tile_size = TILE_SIZE.get(q.device.type, TILE_SIZE_ELSEWHERE)
        all_scores = self.batch * self.kv_heads * self.group * self.queries * keys
        self._scratch_size = max(self._step * self.group * keys, min(self._tile_size, all_scores))
        self._scratch: dict[str, Tensor] = {}

    def query_ranges(self) -> Iterator[QueryRange]:
        """All ranges of queries that see a key."""
        visibility = self.options.visibility
        for start in range(0, self.queries, self._step):
            stop = min(start + self._step, self.queries)
            low, full, high = visibility.key_range(start, stop)
            if low == high:
                continue
            hidden = visibility.hidden(start, stop, full, high, self.q.device)
            visible = (high - low) - hidden.sum(-1)
            penalty = hidden.to(self.dtype).mul_(HIDDEN).expand(self.batch, self.kv_heads, -1, -1, -1)
            yield QueryRange(slice(start, stop), slice(low, high), penalty, visible)

    def head_ranges(self, span: QueryRange) -> Iterator[HeadRange]:
        """As many heads at a time as fill a tile: whole sequences of the batch, or some KV heads of one sequence."""
        scores = self.group * (span.queries.stop - span.queries.start) * (span.keys.stop - span.keys.start)
        fit = max(1, self._tile_size // scores)
        sequences = max(1, fit // self.kv_heads)
        for sequence in range(0, self.batch, sequences):
            for head in range(0, self.kv_heads, fit):
                yield slice(sequence, sequence + sequences), slice(head, head + fit)

    def compute(self, span: QueryRange, heads: HeadRange) -> Tile:
        """The weights and gates of some heads. They are valid until the next call."""
        # 1. Scores and their softmax
        q = merge_heads(self.q[heads][..., span.queries, :].to(self.dtype) * self.options.scale)
        k, v = (x[heads][..., span.keys, :].flatten(0, 1) for x in (self.k, self.v))
        scores = self.product("scores", q, k)
        scores = scores.view(*self.q[heads].shape[:3], -1, scores.shape[-1])
        tanh, cap = None, self.options.softcap
        if cap is not None:
            tanh = torch.div(scores, cap, out=self._like("tanh", scores)).tanh_()
            torch.mul(tanh, cap, out=scores)
        scores[..., scores.shape[-1] - span.penalty.shape[-1] :].add_(span.penalty[heads])
        weight = torch.softmax(scores, -1, out=self._like("weight", scores))
        # 2. Gates. sign and relu give 1[logit > 0] faster than a comparison does.
        logits = self._logits(scores, weight, span, heads)
        gate = torch.sign(logits, out=self._like("gate", logits)).relu_()
        open_keys = gate.sum(-1).to(torch.int64)
        chance = logits.sigmoid_()
        uniform = None
        if self.options.noise is not None:
            of_queries, of_keys = self.options.noise
            uniform = hash_uniform(
                of_queries[heads][..., span.queries, :],
                of_keys[heads][..., span.keys],
                self._like("uniform", chance),
                self._memory("integers", chance.shape, torch.int32),
                self._memory("shifted", chance.shape, torch.int32),
            )
            torch.sub(chance, uniform, out=gate).sign_().relu_()
        return Tile(q, k, v, open_keys, weight, chance, gate, uniform, tanh)

    def _logits(self, scores: Tensor, weight: Tensor, span: QueryRange, heads: HeadRange) -> Tensor:
        """Turn scores into gate logits, divided by the temperature, in place."""
        offset = self.query_offset[heads][..., span.queries, None]
        if self.options.probability:
            # log p = score - log(sum of exponentials), and the latter follows from the largest score and weight. The
            # limit keeps the gates closed of a query that sees no key: all its scores are HIDDEN.
            log_sum = scores.amax(-1, keepdim=True) - weight.amax(-1, keepdim=True).log()
            offset = offset - log_sum.clamp(min=HIDDEN / 10)
        logits = scores.add_(offset)
        if self.key_offset is not None:
            logits.add_(self.key_offset[heads][..., None, span.keys])
        return logits if self.options.temperature == 1 else logits.div_(self.options.temperature)

    def soft_slope(self, tile: Tile) -> Tensor | None:
        """The derivative of the soft gate by logit / temperature, or None where gates carry no gradient.

        A sampled gate becomes sigmoid(logit / temperature + logit(U)) in the backward pass. With p the chance and
        u = 1 - U, that is p (1 - u) / (p (1 - u) + (1 - p) u), which needs no logarithm. Overwrites `tile.uniform`.
        """
        p, u = tile.chance, tile.uniform
        if u is None and not self.options.straight_through:
            return None
        soft = self._like("soft", p)
        if u is None:
            return torch.addcmul(p, p, p, value=-1, out=soft)
        torch.addcmul(p, p, u, value=-1, out=soft)
        soft.div_(u.addcmul_(p, u, value=-1).add_(soft))
        return soft.addcmul_(soft, soft, value=-1)

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """left right^T, head by head, in the scratch memory of this name."""
        shape = (left.shape[0], left.shape[1], right.shape[1])
        return torch.bmm(left, right.mT, out=self._memory(name, shape, left.dtype))

    def _like(self, name: str, other: Tensor) -> Tensor:
        return self._memory(name, other.shape, other.dtype)

    def _memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self._scratch_size, dtype=dtype, device=self.q.device)
        return self._scratch[name][: math.prod(shape)].view(*shape)


def merge_heads(x: Tensor) -> Tensor:
    """(batch, kv_head, group, query, any) as a batch of matrices (batch * kv_head, group * query, any)."""
    return x.flatten(2, 3).flatten(0, 1)

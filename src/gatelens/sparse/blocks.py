"""Gated attention of one block of queries: which keys it sees, its weights, its gates and their noise.

`gated_attention` describes the operator; here it is cut into blocks that stay in the processor's cache. All blocks of
a pass are computed in the same scratch memory, because fresh memory for each would cost more than the arithmetic.
Axes: q is (batch, kv, group, query, dim), where group counts the heads that share a kv head; k and v are
(batch, kv, key, dim), the bias (batch, kv, group), and a block of scores (batch, kv, group, query, key).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Added to the score of a hidden pair: its weight and gate are then exactly 0. A query that sees nothing so gives 0,
# where minus infinity would give NaN. No bias may reach it.
HIDDEN = -1e30
LARGEST_BIAS = 1e28
# Scores in a block, and rows in the matrix product that makes them. A CPU wants its few blocks in the cache, other
# devices want much work at once.
BLOCK = {"cpu": 1 << 17}
BLOCK_ELSEWHERE = 1 << 24
ROWS = 128

Heads = tuple[slice, slice]  # some rows of the batch, some kv heads


@dataclass(frozen=True)
class Sight:
    """Which keys a query sees. mask: (batch or 1, kv or 1, group or 1, query, key), true for a visible pair."""

    queries: int
    keys: int
    causal: bool
    window: int | None
    padding: Tensor | None
    mask: Tensor | None

    @property
    def first(self) -> int:
        """The position of the first query among the keys: causal queries are the last tokens."""
        return self.keys - self.queries if self.causal else 0

    def span(self, start: int, stop: int) -> tuple[int, int, int]:
        """low, edge, high: queries start to stop see all keys from low to edge, some up to high, and no others."""
        low, high = 0, self.keys
        if self.causal:
            high = self.first + stop
        if self.window is not None:
            low = max(0, self.first + start - self.window + 1)
        if self.mask is not None:
            seen = self.mask[..., start:stop, :].flatten(0, -2).any(0).nonzero()
            low, high = (max(low, int(seen[0])), min(high, int(seen[-1]) + 1)) if len(seen) else (0, 0)
        if self.window is not None or self.padding is not None or self.mask is not None:
            edge = low
        else:
            edge = self.first + start + 1 if self.causal else high
        return low, edge, max(low, high)

    def hidden(self, start: int, stop: int, low: int, high: int, device: torch.device) -> Tensor:
        """True where a query of start to stop does not see a key of low to high; five axes, some of size 1."""
        query = torch.arange(self.first + start, self.first + stop, device=device)[:, None]
        key = torch.arange(low, high, device=device)
        hidden = torch.zeros(1, 1, 1, stop - start, high - low, dtype=torch.bool, device=device)
        if self.causal:
            hidden = hidden | (key > query)
        if self.window is not None:
            hidden = hidden | (key <= query - self.window)
        if self.padding is not None:
            hidden = hidden | ~self.padding[:, None, None, None, low:high]
            if self.causal:
                hidden = hidden | ~self.padding[:, None, None, self.first + start : self.first + stop, None]
        if self.mask is not None:
            hidden = hidden | ~self.mask[..., start:stop, low:high]
        return hidden


@dataclass(frozen=True)
class Setting:
    """What forward and backward share besides the tensors that carry gradient."""

    scale: float
    softcap: float | None
    sight: Sight
    noise: tuple[Tensor, Tensor] | None  # see `noise_integers`; None where gates are not drawn


@dataclass(frozen=True)
class Rows:
    """A block of queries and the keys that it sees."""

    queries: slice
    keys: slice
    hidden: Tensor  # (batch, kv, group or 1, query, last keys): added to the scores of the last keys
    pairs: Tensor  # number of visible pairs, broadcasts to (batch, kv, group)


@dataclass(frozen=True)
class Block:
    """Attention of a block of queries in some heads. From `weight` on, tensors are in scratch memory."""

    q: Tensor  # (batch x kv, group x query, dim), scaled
    k: Tensor  # (batch x kv, key, dim)
    v: Tensor
    opened: Tensor  # (batch, kv, group): number of pairs with s + b > 0
    weight: Tensor  # softmax(s)
    chance: Tensor  # sigmoid(s + b)
    gate: Tensor  # A, 0.0 or 1.0
    uniform: Tensor | None  # 1 - U: a drawn gate is open where this is below its chance
    tanh: Tensor | None  # of the scores before soft-capping


class Blocks:
    """Cuts the problem into blocks and computes them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, setting: Setting) -> None:
        self.q, self.k, self.v = q, k.to(bias.dtype).contiguous(), v.to(bias.dtype).contiguous()
        self.bias, self.setting = bias[..., None, None], setting
        self.batch, self.kv_heads, self.group, self.queries, _ = q.shape
        keys = k.shape[2]
        # Short sequences are cut into four all the same, to skip what lies above the diagonal.
        self._step = min(max(ROWS // self.group, 16), max(self.queries // 4, 32), max(self.queries, 1))
        self._fill = BLOCK.get(q.device.type, BLOCK_ELSEWHERE)
        everything = self.batch * self.kv_heads * self.group * self.queries * keys
        self._size = max(self._step * self.group * keys, min(self._fill, everything))
        self._scratch: dict[str, Tensor] = {}

    def rows(self) -> Iterator[Rows]:
        """All blocks of queries that see a key."""
        sight = self.setting.sight
        for start in range(0, self.queries, self._step):
            stop = min(start + self._step, self.queries)
            low, edge, high = sight.span(start, stop)
            if low == high:
                continue
            hidden = sight.hidden(start, stop, edge, high, self.q.device)
            pairs = (stop - start) * (high - low) - hidden.sum((-1, -2))
            penalty = hidden.to(self.bias.dtype).mul_(HIDDEN).expand(self.batch, self.kv_heads, -1, -1, -1)
            yield Rows(slice(start, stop), slice(low, high), penalty, pairs)

    def heads(self, rows: Rows) -> Iterator[Heads]:
        """As many heads at a time as fill a block: whole rows of the batch, or some kv heads of one row."""
        scores = self.group * (rows.queries.stop - rows.queries.start) * (rows.keys.stop - rows.keys.start)
        fit = max(1, self._fill // scores)
        batch_rows = max(1, fit // self.kv_heads)
        for row in range(0, self.batch, batch_rows):
            for head in range(0, self.kv_heads, fit):
                yield slice(row, row + batch_rows), slice(head, head + fit)

    def compute(self, rows: Rows, heads: Heads) -> Block:
        """Weights and gates of some heads; they last until the next call."""
        # 1. scores and their softmax
        q = flat(self.q[heads][..., rows.queries, :].to(self.bias.dtype) * self.setting.scale)
        k, v = (x[heads][..., rows.keys, :].flatten(0, 1) for x in (self.k, self.v))
        scores = self.product("scores", q, k)
        scores = scores.view(*self.q[heads].shape[:3], -1, scores.shape[-1])
        tanh, cap = None, self.setting.softcap
        if cap is not None:
            tanh = torch.div(scores, cap, out=self._like("tanh", scores)).tanh_()
            torch.mul(tanh, cap, out=scores)
        scores[..., scores.shape[-1] - rows.hidden.shape[-1] :].add_(rows.hidden[heads])
        weight = torch.softmax(scores, -1, out=self._like("weight", scores))
        # 2. gates: sign and relu make 1[s + b > 0], faster than a comparison does
        logits = scores.add_(self.bias[heads])
        gate = torch.sign(logits, out=self._like("gate", logits)).relu_()
        opened = gate.sum((-1, -2)).to(torch.int64)
        chance = logits.sigmoid_()
        uniform = None
        if self.setting.noise is not None:
            of_queries, of_keys = self.setting.noise
            uniform = hash_uniform(
                of_queries[heads][..., rows.queries, :],
                of_keys[heads][..., rows.keys],
                self._like("uniform", chance),
                self._memory("integers", chance.shape, torch.int32),
                self._memory("shifted", chance.shape, torch.int32),
            )
            torch.sub(chance, uniform, out=gate).sign_().relu_()
        return Block(q, k, v, opened, weight, chance, gate, uniform, tanh)

    def soft_slope(self, block: Block) -> Tensor | None:
        """The derivative of sigmoid(s + b + logit(U)) by s, if gates were drawn. Overwrites `block.uniform`.

        With p the chance and u = 1 - U, that sigmoid is p (1 - u) / (p (1 - u) + (1 - p) u): no logarithm.
        """
        if block.uniform is None:
            return None
        p, u = block.chance, block.uniform
        soft = torch.addcmul(p, p, u, value=-1, out=self._like("soft", p))
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
            self._scratch[name] = torch.empty(self._size, dtype=dtype, device=self.q.device)
        return self._scratch[name][: math.prod(shape)].view(*shape)


def flat(x: Tensor) -> Tensor:
    """(batch, kv, group, query, any) as the batch of matrices (batch x kv, group x query, any)."""
    return x.flatten(2, 3).flatten(0, 1)


def noise_integers(
    heads: tuple[int, int, int],
    queries: int,
    keys: int,
    device: torch.device,
    generator: torch.Generator | Sequence[torch.Generator] | None,
) -> tuple[Tensor, Tensor]:
    """A random 32-bit integer for each query and each key of each head, from which all gate noise follows.

    heads: (batch, kv, group). With one generator for each row, a row's noise is the same in whatever batch it is.
    """
    if isinstance(generator, Sequence):
        rows = [noise_integers((1, *heads[1:]), queries, keys, device, one) for one in generator]
        of_queries, of_keys = zip(*rows, strict=True)
        return torch.cat(of_queries), torch.cat(of_keys)
    low, high = -(2**31), 2**31
    where = device if generator is None else generator.device
    return (
        torch.randint(low, high, (*heads, queries, 1), dtype=torch.int32, device=where, generator=generator).to(device),
        torch.randint(low, high, (*heads, 1, keys), dtype=torch.int32, device=where, generator=generator).to(device),
    )


def hash_uniform(of_queries: Tensor, of_keys: Tensor, out: Tensor, integers: Tensor, shifted: Tensor) -> Tensor:
    """Uniform numbers strictly between 0 and 1, one for each pair of a query's and a key's integer.

    A multiplicative hash of the exclusive or of the two, four times faster than torch's generator, and the same
    however the pairs are cut into blocks. `integers` and `shifted` are scratch memory.
    """
    x = torch.bitwise_xor(of_queries, of_keys, out=integers)
    x.mul_(0x7FEB352D)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted))
    x.mul_(0x846CA68B - 2**32)
    return out.copy_(x).mul_(2.0**-32 * (1 - 2.0**-22)).add_(0.5)

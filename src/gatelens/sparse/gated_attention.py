"""Attention with a gate on every edge: the operator that sparse post-training trains.

With s the scaled (and, where asked, soft-capped) score of a query-key pair, p = softmax(s over all visible keys), b the
bias of the head, a_i the offset of the query and c_j the offset of the key, the argument `gate` chooses the gate logit

    score:        l_ij = s_ij + b + a_i + c_j          the paper's, with a = c = 0
    probability:  l_ij = log p_ij + b + a_i + c_j

and with r the rest value of the head (0 unless it is given)

    A = 1[l > 0]                                       in use (sample=False)
    A = 1[l / t + logit(U) > 0]                        in training (sample=True), U uniform on (0, 1)
    z_i = sum over j of p_ij (A_ij v_j + (1 - A_ij) r) not renormalised after gating

So a closed edge carries the constant r instead of the key's value. As p sums to 1, this is
z_i = r + sum over j of A_ij p_ij (v_j - r). The temperature t is 1 in the paper. With a lower one, sampled gates differ
less from those in use, and the many edges whose gates are nearly closed add less to the expected number of open edges.

Gradients. Sampled gates are straight through: the backward pass takes A for sigmoid(l / t + logit(U)). Gates that are
not sampled have their true derivative, which is 0 almost everywhere: then softmax, values and the expected number of
open edges carry gradients, and A does not. With `straight_through=True` the backward pass takes A for sigmoid(l / t).

Cost. About one softmax attention. Some queries meet all keys that they see at once, and the backward pass computes
these scores again. So memory is linear in the sequence length, and keys that no query sees (above the causal diagonal,
outside the window) cost nothing.

Draye, Lei, Pan, Posner, Schölkopf: Sparse attention post-training for mechanistic interpretability, arXiv 2512.05865.
The probability gate, the offsets and the rest value are gatelens's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.sparse._autograd import GatedAttentionFunction
from gatelens.sparse._noise import noise_integers
from gatelens.sparse._tiles import LARGEST_OFFSET, Options
from gatelens.sparse._visibility import Visibility

Gate = Literal["score", "probability"]


class GatedAttention(tuple[Tensor, Tensor, Tensor | None]):
    """The result `(z, expected_open, open_edges)` of `gated_attention`, with more numbers as attributes.

    Keys are counted as open where l > 0, whether or not gates are sampled.
    """

    open_share: Float[Tensor, "batch head"]
    """Number of open edges divided by the number of visible pairs, without gradient."""
    pairs: Int64[Tensor, "batch head"]
    """Number of visible pairs."""
    open_keys: Int64[Tensor, "batch head query"]
    """Number of open keys of each query."""
    visible_keys: Int64[Tensor, "batch head query"]
    """Number of keys that each query sees."""
    expected_keys: Float[Tensor, "batch head query"]
    """Sum of sigmoid(l / t) over the keys that a query sees, with gradient."""

    @classmethod
    def of(
        cls,
        z: Tensor,
        expected_keys: Float[Tensor, "batch head query"],
        open_keys: Int64[Tensor, "batch head query"],
        visible_keys: Int64[Tensor, "batch head query"],
        edges: Tensor | None,
    ) -> GatedAttention:
        """The result, with means over visible pairs from the numbers of keys of each query."""
        pairs = visible_keys.sum(-1)
        at_least_one = pairs.clamp(min=1)
        result = cls((z, expected_keys.sum(-1) / at_least_one, edges))
        result.open_share, result.pairs = open_keys.sum(-1) / at_least_one, pairs
        result.open_keys, result.visible_keys, result.expected_keys = open_keys, visible_keys, expected_keys
        return result


def gated_attention(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    bias: float | Float[Tensor, ...] = 0.0,
    causal: bool = True,
    sample: bool = False,
    *,
    gate: Gate = "score",
    query_offset: Float[Tensor, "batch head query"] | None = None,
    key_offset: Float[Tensor, "batch head key"] | None = None,
    rest: Float[Tensor, "head value_dim"] | None = None,
    temperature: float = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    padding: Shaped[Tensor, "batch key"] | None = None,
    mask: Shaped[Tensor, ...] | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    straight_through: bool = False,
    return_open: bool = False,
) -> GatedAttention:
    """Attend through gates, as defined at the top of this module.

    Arguments:
        q, k, v: kv_head divides head (grouped-query attention).
        bias: a number, or a tensor that broadcasts to (batch, head).
        causal: no query sees a later key. The queries are the last tokens of the keys, as in decoding with a cache.
        sample: sample the gates.
        gate: what the gate sees of an edge, its score or its log-probability.
        query_offset, key_offset: added to the gate logit; zero by default.
        rest: the rest value of each head, which a closed edge carries; zero by default.
        temperature: t, above 0: divides the gate logit where gates are sampled, expected or differentiated.
        scale: multiplies q.k; 1/sqrt(dim) by default.
        softcap: scores become softcap * tanh(score / softcap).
        window: with causal, a query sees this many keys, itself included.
        padding: True for a real token. A padded token is not seen and, with causal, sees nothing.
        mask: True for a visible pair, in addition to the above; broadcasts to (batch, head, query, key).
        generator: of the sampled gates, one for all or one for each sequence; torch's global generator by default.
        straight_through: let gradients pass through gates that are not sampled too, for attribution.
        return_open: also return the gates, in memory quadratic in the sequence length.

    Returns:
        z: (batch, head, query, value_dim) in the dtype of q, computed in float32 or better; 0 if a query sees no key.
        expected_open: (batch, head), the mean of sigmoid(l / t) over visible pairs, 0..1, with gradient.
        open_edges: (batch, head, query, key), True where the gate that was used is open; None unless asked for.

    Example:
        z, expected_open, _ = gated_attention(q, k, v, bias=5.0, gate="probability", sample=True)
    """
    _check(q, k, v, causal, window, padding, mask, gate, temperature)
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    groups = (kv_heads, heads // kv_heads)
    padding = None if padding is None else padding.bool()
    mask = None if mask is None else _group_mask(mask, (batch, heads, queries, keys), groups)
    options = Options(
        scale=dim**-0.5 if scale is None else scale,
        softcap=softcap,
        probability=gate == "probability",
        temperature=temperature,
        straight_through=straight_through,
        visibility=Visibility(queries, keys, causal, window, padding, mask),
        noise=noise_integers((batch, *groups), queries, keys, q.device, generator) if sample else None,
    )
    # The offsets, in the dtype that is computed in; the bias becomes part of the queries' offsets.
    of_queries = broadcast("bias", _wide(bias, q), (batch, heads))[..., None].expand(batch, heads, queries)
    if query_offset is not None:
        of_queries = of_queries + _exact("query_offset", query_offset, (batch, heads, queries), q)
    of_keys = None if key_offset is None else _exact("key_offset", key_offset, (batch, heads, keys), q)
    rest = None if rest is None else _exact("rest", rest, (heads, v.shape[-1]), q)
    with torch.autocast(q.device.type, enabled=False):  # scores stay in float32 under mixed precision
        z, *counts, edges = GatedAttentionFunction.apply(  # type: ignore[no-untyped-call]
            q.unflatten(1, groups),
            k,
            v,
            of_queries.unflatten(1, groups),
            None if of_keys is None else of_keys.unflatten(1, groups),
            None if rest is None else rest.unflatten(0, groups),
            options,
            return_open,
        )
    expected, opened, visible = (count.flatten(1, 2) for count in counts)
    return GatedAttention.of(z.flatten(1, 2), expected, opened, visible, edges.flatten(1, 2) if return_open else None)


def _group_mask(
    mask: Tensor, shape: tuple[int, int, int, int], groups: tuple[int, int]
) -> Bool[Tensor, "#batch #kv_head #group query key"]:
    """A mask with the heads as (kv_head, group). Axes that sequences or heads share keep the size 1."""
    broadcast("mask", mask, shape)
    mask = mask[(None,) * (4 - mask.ndim)].expand(-1, -1, *shape[2:])
    return mask.unflatten(1, groups if mask.shape[1] == shape[1] else (1, 1))


def _wide(x: float | Tensor, q: Tensor) -> Tensor:
    """In float32 or better, where q is, and finite: infinite biases stand for gates that are always open or closed."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.as_tensor(x, dtype=dtype, device=q.device).clamp(-LARGEST_OFFSET, LARGEST_OFFSET)


def _exact(name: str, x: Tensor, shape: tuple[int, ...], q: Tensor) -> Tensor:
    if tuple(x.shape) != shape:
        raise GatelensError(f"{name} should have the shape {shape}, not {tuple(x.shape)}.")
    return _wide(x, q)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    padding: Tensor | None,
    mask: Tensor | None,
    gate: str,
    temperature: float,
) -> None:
    """Raise one clear sentence for arguments that would fail far from here, or give wrong numbers."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or q[:, 0, 0].shape != k[:, 0, 0].shape:
        raise GatelensError(f"q, k and v should be (batch, head, token, dim) and fit together, not {shapes}.")
    if q.shape[1] % k.shape[1]:
        raise GatelensError(f"the number of KV heads should divide the number of heads: {shapes}.")
    if causal and q.shape[2] > k.shape[2]:
        raise GatelensError(
            f"causal queries are the last of the keys, so there cannot be more queries than keys: {shapes}."
        )
    if window is not None and (window < 1 or not causal):
        raise GatelensError("a window should be at least 1 and needs causal=True; use mask= for other patterns.")
    if padding is not None and (padding.shape != (k.shape[0], k.shape[2]) or padding.is_floating_point()):
        raise GatelensError(f"padding should be True for real tokens and of shape {(k.shape[0], k.shape[2])}.")
    if mask is not None and mask.dtype != torch.bool:
        raise GatelensError(f"mask should be boolean, True for a visible pair, not {mask.dtype}.")
    if gate not in get_args(Gate):
        raise GatelensError(f"gate should be one of {', '.join(get_args(Gate))}, not {gate!r}.")
    if not temperature > 0:
        raise GatelensError(f"temperature is {temperature}: it must be above 0.")


def broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x as a view of this shape."""
    try:
        return x.expand(shape)
    except RuntimeError as error:
        raise GatelensError(f"{name} should broadcast to {shape}, and {tuple(x.shape)} does not.") from error

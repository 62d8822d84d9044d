"""Gates for a dense model, without training: thresholds and rest values that follow from its attention on some text.

A probability gate without offsets is open where p > exp(-b). For each head, the threshold exp(-b) is as large as
possible while the open edges still have a given share of the attention mass (the sum of p over all edges). The rest
value of a head is then the mean value of what is closed, weighted by p: of all constants, this one has the smallest
mean squared error, weighted by p, when it stands for the value of a closed edge.

Both follow from the attention of the dense model: edges that are closed in lower layers do not change the inputs of
higher ones here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gatelens.errors import GatelensError
from gatelens.sparse._head_gates import NAME
from gatelens.sparse.in_model import GateValues
from gatelens.sparse.recording import attention_modules

LOWEST = -20.0  # edges with a smaller log p are counted as if they had this one
WIDTH = 0.01  # resolution of the thresholds, in log p
BINS = round(-LOWEST / WIDTH)

Collect = Callable[[int, Tensor, Tensor], None]
"""Called as collect(layer, p, v) with p (batch, head, query, key), 0 where hidden, and v (batch, head, key, dim)."""


@torch.no_grad()
def calibrate(hf: Any, tokens: Int[Tensor, "sequence token"], share: float = 0.95, batch: int = 2) -> GateValues:
    """Choose the bias and the rest value of every head from the attention of a dense model on some sequences.

    Cost: two forward passes of the sequences, with attention weights in memory for one layer at a time.

    Arguments:
        hf: a Hugging Face causal LM. If it is sparse, its attention without gates counts.
        tokens: sequences without padding.
        share: the share of each head's attention mass that stays open, above 0 and up to 1.

    Returns:
        Probability gates with offsets of 0, for `make_sparse`.

    Example:
        make_sparse(hf, **vars(calibrate(hf, tokens, share=0.9)))
    """
    if not 0 < share <= 1:
        raise GatelensError(f"share is {share}: it must be above 0 and at most 1.")
    thresholds = _thresholds(hf, tokens, share, batch)
    offsets = torch.zeros(*thresholds.shape, hf.config.hidden_size)
    rest = _rest_values(hf, tokens, thresholds, batch)
    return GateValues("probability", -thresholds.float(), offsets, offsets.clone(), rest.float())


def _thresholds(hf: Any, tokens: Tensor, share: float, batch: int) -> Float[Tensor, "layer head"]:
    """The largest threshold of log p, in steps of `WIDTH`, above which every head has the share of its mass."""
    layers, heads = len(attention_modules(hf)), hf.config.num_attention_heads
    mass = torch.zeros(layers, heads, BINS, dtype=torch.float64)  # attention mass by log p

    def collect(layer: int, p: Tensor, _: Tensor) -> None:
        by_head = p.transpose(0, 1).flatten(1)
        bins = by_head.log().sub_(LOWEST).div_(WIDTH).floor_().clamp_(0, BINS - 1).long()
        mass[layer].scatter_add_(1, bins.cpu(), by_head.double().cpu())

    _run(hf, tokens, collect, batch)
    above = mass.flip(-1).cumsum(-1).flip(-1)  # mass of this bin and all higher ones
    enough = above >= share * above[..., :1]
    # Sums that are rounded may fall short of the whole by a little: the lowest bin always has enough.
    highest = torch.where(enough, torch.arange(BINS), 0).amax(-1)
    return LOWEST + WIDTH * highest


def _rest_values(
    hf: Any, tokens: Tensor, thresholds: Float[Tensor, "layer head"], batch: int
) -> Float[Tensor, "layer head dim"]:
    """The mean value of closed edges, weighted by p; 0 for a head without closed edges."""
    layers: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer: sum of p v, and of p

    def collect(layer: int, p: Tensor, v: Tensor) -> None:
        closed = torch.where(p.log() > thresholds[layer].to(p)[:, None, None], 0.0, p)
        values = (closed @ v).double().sum((0, 2)).cpu()
        mass = closed.double().sum((0, 2, 3)).cpu()
        before = layers.get(layer, (torch.zeros_like(values), torch.zeros_like(mass)))
        layers[layer] = (before[0] + values, before[1] + mass)

    _run(hf, tokens, collect, batch)
    sums = [layers[layer] for layer in sorted(layers)]
    return torch.stack([torch.where(mass > 0, values.T / mass, 0.0).T for values, mass in sums])


def _run(hf: Any, tokens: Tensor, collect: Collect, batch: int) -> None:
    device = hf.get_input_embeddings().weight.device
    with _collecting(hf, collect):
        for some in tokens.to(device).split(batch):
            hf(input_ids=some, use_cache=False, logits_to_keep=1)


@contextmanager
def _collecting(hf: Any, collect: Collect) -> Iterator[None]:
    """Inside, the model computes plain attention and hands its weights and values to `collect`."""
    implementation, training = hf.config._attn_implementation, hf.training
    modules = attention_modules(hf)
    for module in modules:
        module.gate_collect = collect
    hf.set_attn_implementation(_NAME)
    hf.eval()
    try:
        yield
    finally:
        hf.train(training)
        hf.set_attn_implementation(implementation)
        for module in modules:
            del module.gate_collect


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain softmax attention in float32 or better."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (key, value))
    scores = query.to(dtype) @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    p = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    module.gate_collect(module.layer_idx, p, v)
    return (p @ v).to(query).transpose(1, 2).contiguous(), None


def _whole_mask(**arguments: Any) -> Tensor | None:
    mask: Tensor | None = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    return mask


_NAME = f"calibrate-{NAME}"  # does not begin with the name of gated attention, so that no offsets are computed
AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _whole_mask)

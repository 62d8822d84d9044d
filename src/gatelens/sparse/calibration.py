"""Gates for a dense model, without training: thresholds and rest values that follow from its attention on some text.

A probability gate without offsets is open where p > exp(-b). For each head, the threshold exp(-b) is as large as
possible while the open edges still have a given share of the attention mass (the sum of p over all edges). The rest
value of a head is then the mean value of what is closed, weighted by p: of all constants, this one has the smallest
mean squared error, weighted by p, when it stands for the value of a closed edge.

In many models the first token takes much of the attention, and its value is nearly the same in all texts. The rest
value can stand for it. With `close_first`, the offset of keys follows the direction of the module's input in which
first tokens differ from others, so that edges to the first token are closed, and the share counts the mass of other
edges. A layer whose first tokens are not set apart in this direction has no offsets. This is so in the first layer, if
texts begin with different words.

All of this follows from the attention of the dense model: edges that are closed in lower layers do not change the
inputs of higher ones here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gatelens.errors import GatelensError
from gatelens.sparse.in_model import GateValues
from gatelens.sparse.recording import attention_modules
from gatelens.sparse.saved_gates import NAME

LOWEST = -20.0  # edges with a smaller log p are counted as if they had this one
WIDTH = 0.01  # resolution of the thresholds, in log p
BINS = round(-LOWEST / WIDTH)
TOKENS_AT_ONCE = 512
MARGIN = 2.0  # how far below 0 the gate logit of an edge to an average first token is at least
SET_APART = 0.5  # least position of a first token: 0 is the mean of the other tokens, 1 that of all first tokens

Collect = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called as collect(layer, p, v, x) with p (batch, head, query, key), 0 where hidden, v (batch, head, key, dim), and
the input of the attention module x (batch, token, width)."""


@torch.no_grad()
def calibrate(
    hf: Any, batches: Sequence[Int[Tensor, "_ _"]], share: float = 0.95, close_first: bool = False
) -> GateValues:
    """Choose the bias and the rest value of every head from the attention of a dense model on some sequences.

    Cost: two forward passes of the sequences (three with `close_first`), with attention weights in memory for one layer
    at a time.

    Arguments:
        hf: a Hugging Face causal LM. If it is sparse, its attention without gates counts.
        batches: sequences without padding, (sequence, token). The lengths of batches may differ.
        share: the share of each head's attention mass that stays open, above 0 and up to 1.
        close_first: close the edges to the first token of a sequence; `share` then counts all other edges.

    Returns:
        Probability gates for `make_sparse`. Their offsets are 0, but for those of keys with `close_first`.

    Example:
        make_sparse(hf, **vars(calibrate(hf, [tokens], share=0.9)))
    """
    if not 0 < share <= 1:
        raise GatelensError(f"share is {share}: it must be above 0 and at most 1.")
    bias = -_thresholds(hf, batches, share, first=1 if close_first else 0).float()
    query = torch.zeros(*bias.shape, hf.config.hidden_size)
    key = query.clone()
    if close_first:
        direction, others = _first_token_direction(hf, batches)
        strength = bias.clamp(min=0) + MARGIN
        key = -strength[..., None] * direction[:, None]
        bias = bias + strength * others[:, None]  # so that the gates of an average other token do not change
    rest = _rest_values(hf, batches, bias, key)
    return GateValues("probability", bias, query, key, rest.float())


@torch.no_grad()
def input_sizes(hf: Any, batches: Sequence[Int[Tensor, "_ _"]]) -> Float[Tensor, " layer"]:
    """The root mean square of the input of each attention module, on some sequences. Cost: one forward pass."""
    squares: dict[int, Tensor] = {}

    def collect(layer: int, _p: Tensor, _v: Tensor, x: Tensor) -> None:
        squares[layer] = squares.get(layer, torch.zeros(())) + x.double().square().mean(-1).sum().cpu()

    _run(hf, batches, collect)
    return torch.stack([squares[layer] for layer in sorted(squares)]).div(sum(map(torch.numel, batches))).sqrt().float()


def _thresholds(hf: Any, batches: Sequence[Tensor], share: float, first: int) -> Float[Tensor, "layer head"]:
    """The largest threshold of log p, in steps of `WIDTH`, above which every head has the share of its mass.

    Arguments:
        first: queries and keys before this token do not count.
    """
    layers, heads = len(attention_modules(hf)), hf.config.num_attention_heads
    mass = torch.zeros(layers, heads, BINS, dtype=torch.float64)  # attention mass by log p

    def collect(layer: int, p: Tensor, *_: Tensor) -> None:
        by_head = p[..., first:, first:].transpose(0, 1).flatten(1)
        bins = by_head.log().sub_(LOWEST).div_(WIDTH).floor_().clamp_(0, BINS - 1).long()
        mass[layer].scatter_add_(1, bins.cpu(), by_head.double().cpu())

    _run(hf, batches, collect)
    above = mass.flip(-1).cumsum(-1).flip(-1)  # mass of this bin and all higher ones
    enough = above >= share * above[..., :1]
    # Sums that are rounded may fall short of the whole by a little: the lowest bin always has enough.
    highest = torch.where(enough, torch.arange(BINS), 0).amax(-1)
    return LOWEST + WIDTH * highest


def _first_token_direction(
    hf: Any, batches: Sequence[Tensor]
) -> tuple[Float[Tensor, "layer width"], Float[Tensor, " layer"]]:
    """Where first tokens are in the inputs of each layer, as a direction d and a number m.

    d . x - m is 0 for the mean of all other tokens and 1 for the mean of the first tokens. Both are 0 for a layer that
    does not set all first tokens apart.
    """
    first_tokens: dict[int, list[Tensor]] = {}
    sums: dict[int, Tensor] = {}

    def collect(layer: int, _p: Tensor, _v: Tensor, x: Tensor) -> None:
        first_tokens.setdefault(layer, []).append(x[:, 0].double().cpu())
        sums[layer] = sums.get(layer, torch.zeros(x.shape[-1])) + x[:, 1:].double().sum((0, 1)).cpu()

    _run(hf, batches, collect)
    others_read = sum(tokens[:, 1:].numel() for tokens in batches)
    directions, others = [], []
    for layer in sorted(sums):
        first, mean = torch.cat(first_tokens[layer]), sums[layer] / max(1, others_read)
        difference = first.mean(0) - mean
        direction = difference / difference.square().sum().clamp(min=1e-30)
        if _positions(first, mean).min() < SET_APART:
            direction = torch.zeros_like(direction)
        directions.append(direction)
        others.append(mean @ direction)
    return torch.stack(directions).float(), torch.stack(others).float()


def _positions(first: Float[Tensor, "sequence width"], mean: Float[Tensor, " width"]) -> Float[Tensor, " sequence"]:
    """Where each first token is between the mean of other tokens, 0, and the mean of the first tokens, 1.

    That mean is over the first tokens of all other sequences. With its own, any vector of many dimensions would seem to
    be near 1 among a few sequences. A single sequence has position 0.
    """
    without = (first.sum(0) - first) / max(1, len(first) - 1) - mean
    positions = ((first - mean) * without).sum(-1) / without.square().sum(-1).clamp(min=1e-30)
    return positions if len(first) > 1 else torch.zeros_like(positions)


def _rest_values(
    hf: Any, batches: Sequence[Tensor], bias: Float[Tensor, "layer head"], key: Float[Tensor, "layer head width"]
) -> Float[Tensor, "layer head dim"]:
    """The mean value of closed edges, weighted by p; 0 for a head without closed edges."""
    layers: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer: sum of p v, and of p

    def collect(layer: int, p: Tensor, v: Tensor, x: Tensor) -> None:
        offsets = (x.to(p) @ key[layer].to(p).mT).mT  # (batch, head, key)
        thresholds = -(bias[layer].to(p)[:, None] + offsets)
        closed = torch.where(p.log() > thresholds[:, :, None], 0.0, p)
        values = (closed @ v).double().sum((0, 2)).cpu()
        mass = closed.double().sum((0, 2, 3)).cpu()
        before = layers.get(layer, (torch.zeros_like(values), torch.zeros_like(mass)))
        layers[layer] = (before[0] + values, before[1] + mass)

    _run(hf, batches, collect)
    sums = [layers[layer] for layer in sorted(layers)]
    return torch.stack([torch.where(mass > 0, values.T / mass, 0.0).T for values, mass in sums])


def _run(hf: Any, batches: Sequence[Tensor], collect: Collect) -> None:
    device = hf.get_input_embeddings().weight.device
    with _collecting(hf, collect):
        for tokens in batches:
            for some in tokens.to(device).split(max(1, TOKENS_AT_ONCE // tokens.shape[1])):
                hf(input_ids=some, use_cache=False, logits_to_keep=1)


@contextmanager
def _collecting(hf: Any, collect: Collect) -> Iterator[None]:
    """Inside, the model computes plain attention and hands its weights and values to `collect`."""
    implementation, training = hf.config._attn_implementation, hf.training
    modules = attention_modules(hf)
    hooks = [module.register_forward_pre_hook(_keep_input, with_kwargs=True) for module in modules]
    for module in modules:
        module.gate_collect = collect
    hf.set_attn_implementation(_NAME)
    hf.eval()
    try:
        yield
    finally:
        hf.train(training)
        hf.set_attn_implementation(implementation)
        for module, hook in zip(modules, hooks, strict=True):
            hook.remove()
            del module.gate_collect


def _keep_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module.gate_input = args[0] if args else kwargs["hidden_states"]


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
    module.gate_collect(module.layer_idx, p, v, module.__dict__.pop("gate_input"))
    return (p @ v).to(query).transpose(1, 2).contiguous(), None


def _whole_mask(**arguments: Any) -> Tensor | None:
    mask: Tensor | None = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    return mask


_NAME = f"calibrate-{NAME}"  # does not begin with the name of gated attention, so that no offsets are computed
AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _whole_mask)

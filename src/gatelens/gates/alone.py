"""Run one component of a model alone, from given inputs, through the model's own code. Gradients pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import forward, skip_to
from gatelens.model import Model
from gatelens.sparse.attention_interface import offset_modules


class Done(Exception):
    """Raised by a hook of `run_attention_until` that has what it wants: the rest of the forward is left out."""


def run_attention_until(
    model: Model, tokens: Tensor, layer: int, projected: Sequence[Tensor], rows: int, hooks: Hooks
) -> None:
    """Run the attention of one layer from other projections, until a registered hook raises `Done`.

    Arguments:
        projected: what the modules return that compute gate offsets (of a sparse model) and the layer's queries, keys
            and values, in the order of their calls; (row * prompt, position, ...).
        rows: how many rows there are.
        hooks: hooks that are registered already; more are added.
    """
    block, outputs = model.anatomy.blocks[layer], list(projected)
    stream = torch.zeros(*tokens.shape, model.anatomy.width, device=block.device, dtype=model.dtype)
    skip_to(model, layer, stream, hooks, rows)
    for module in (*(offset_modules(block.attention) or ()), *block.qkv):
        hooks.instead(module, lambda *_: outputs.pop(0))
    with suppress(Done):
        forward(model, tokens, None, hooks, "last", rows)


def head_outputs(
    model: Model, tokens: Int[Tensor, "prompt position"], layer: int, projected: Sequence[Tensor], rows: int = 1
) -> Float[Tensor, "_ position head dim"]:
    """The outputs z of a layer's heads, from these projections (see `run_attention_until`): (row * prompt, ...)."""
    stored: list[Tensor] = []

    def keep(z: Tensor) -> None:
        stored.append(z)
        raise Done

    with Hooks() as hooks:
        hooks.before(model.anatomy.blocks[layer].out, keep)
        run_attention_until(model, tokens, layer, projected, rows, hooks)
    return stored[0].unflatten(-1, (model.n_heads, model.anatomy.head_dim))


def mlp_output(
    model: Model, layer: int, stream: Float[Tensor, "_ position width"]
) -> Float[Tensor, "_ position width"]:
    """What the MLP of a layer adds to the residual stream if it reads this stream."""
    block = model.anatomy.blocks[layer]
    return block.after_mlp(block.mlp(block.before_mlp(stream)))


def logits_of(
    model: Model, tokens: Int[Tensor, "prompt position"], stream: Float[Tensor, "_ position width"], rows: int = 1
) -> Float[Tensor, "_ vocab"]:
    """The logits at the last position, from what the final norm reads: (row * prompt, ...)."""
    with Hooks() as hooks:
        for block in model.anatomy.blocks:
            hooks.instead(block.layer, lambda hidden, *args, **kwargs: hidden)
        hooks.before(model.anatomy.final_norm.part, lambda _: stream)
        return forward(model, tokens, None, hooks, "last", rows)

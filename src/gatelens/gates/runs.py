"""Plain runs of a model, and what they capture for gated runs.

Everything here goes through the forward of the Hugging Face model. Hooks skip layers, replace residual streams and
select the positions whose logits are computed, so the remaining arithmetic is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.hooks import Hooks
from gatelens.model import Model
from gatelens.runtime.context import Context

LogitsAt = Literal["last", "all"] | Tensor
"""Which logits to compute: at the last real token, at all positions, or where a mask (prompt, position) is True."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one plain run of a model captured."""

    tokens: Int[Tensor, "prompt position"]
    mask: Shaped[Tensor, "prompt position"] | None  # nonzero for real tokens; None if all tokens are real
    logits: Float[Tensor, "... vocab"]
    heads: Sequence[Float[Tensor, "prompt position head dim"]]  # z of each layer
    streams: Sequence[Float[Tensor, "prompt position width"]]  # the input of each layer


def capture(
    model: Model,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    logits_at: LogitsAt = "last",
    streams: bool = True,
) -> Run:
    """Run the model unchanged and capture every head's output and, if asked, every layer's input. Cost: 1 forward."""
    heads: list[Tensor] = []
    layer_inputs: list[Tensor] = []
    head_axes = (model.n_heads, model.anatomy.head_dim)
    with torch.no_grad(), Hooks() as hooks:
        for block in model.anatomy.blocks:
            if streams:
                hooks.before(block.layer, layer_inputs.append)
            hooks.before(block.out, lambda z: heads.append(z.unflatten(-1, head_axes)))
        logits = forward(model, tokens, mask, hooks, logits_at)
    return Run(tokens, mask, logits, heads, layer_inputs)


def forward(
    model: Model, tokens: Tensor, mask: Tensor | None, hooks: Hooks, logits_at: LogitsAt, rows: int = 1
) -> Tensor:
    """Run the model with the hooks that are registered.

    Arguments:
        tokens: (prompt, position).
        mask: (prompt, position), nonzero for real tokens; None if there is no padding.
        hooks: the registered hooks. The hook that selects positions is added to them.
        logits_at: the positions whose logits are computed.
        rows: how many gate rows run together. The prompts are repeated as a whole, once for each row.

    Returns:
        (row * prompt, vocab) for the last position, (row * prompt, position, vocab) for all positions, or (chosen,
        vocab) for a mask.
    """
    if tokens.shape[1] > model.context:
        raise GatelensError(
            f"a prompt of {tokens.shape[1]} tokens does not fit into {model.name}, which reads {model.context}: "
            "shorten the prompt."
        )
    hooks.before(model.anatomy.unembed, lambda hidden: pick(hidden, mask, logits_at, rows))
    inputs: dict[str, Any] = {"input_ids": repeat(tokens.to(model.device), rows), "use_cache": False}
    if mask is not None:
        # Positions count only real tokens. Otherwise padding on the left would shift all of them.
        real = mask.to(model.device)
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        inputs |= {"attention_mask": repeat(real.long(), rows), "position_ids": repeat(positions, rows)}
    logits: Tensor = model.hf(**inputs).logits
    return logits[:, 0] if isinstance(logits_at, str) and logits_at == "last" else logits


def skip_to(model: Model, layer: int, stream: Tensor, hooks: Hooks, rows: int = 1) -> None:
    """Leave out the layers below ``layer`` and give it ``stream`` (prompt, position, width) as its input."""
    for block in model.anatomy.blocks[:layer]:
        hooks.instead(block.layer, lambda hidden, *args, **kwargs: hidden)
    hooks.before(model.anatomy.blocks[layer].layer, lambda hidden: repeat(stream.to(hidden.device), rows))


def pick(hidden: Tensor, mask: Tensor | None, logits_at: LogitsAt, rows: int) -> Tensor:
    """Select the positions of ``hidden`` (row * prompt, position, width) whose logits are computed."""
    if isinstance(logits_at, Tensor):
        return hidden[repeat(logits_at.to(hidden.device), rows)]
    if logits_at == "all":
        return hidden
    if mask is None:
        return hidden[:, -1:]
    places = torch.arange(mask.shape[1], device=mask.device)
    last = repeat((mask * places).argmax(-1).to(hidden.device), rows)
    return hidden[torch.arange(len(last), device=hidden.device), last, None]


def repeat(x: Tensor, rows: int) -> Tensor:
    """Repeat a tensor as a whole along its first axis, ``rows`` times."""
    return x if rows == 1 else x.repeat(rows, *[1] * (x.ndim - 1))


def rows_that_fit(model: Model, tokens: Tensor, n_logits: int, *, grad: bool, context: Context) -> int:
    """How many gate rows of these prompts fit into the memory budget; at least one.

    Arguments:
        n_logits: positions whose logits are computed, over all prompts.
        grad: whether the run keeps activations for a backward pass.
    """
    per_token = gradient_numbers(model, 1) if grad else numbers_per_token(model)
    numbers = tokens.numel() * per_token + 2 * n_logits * int(model.hf.config.vocab_size)
    if grad:
        numbers += len(tokens) * _attention_weights(model, tokens.shape[1])
    return context.fits(numbers)


def numbers_per_token(model: Model) -> int:
    """Peak memory of a forward pass for one token, in numbers: stream, heads and MLP, about twice each."""
    inner = getattr(model.hf.config, "intermediate_size", None) or 4 * model.anatomy.width
    return 8 * model.anatomy.width + 4 * int(inner)


def gradient_numbers(model: Model, length: int) -> int:
    """Peak memory of a forward-backward pass for one prompt, in numbers: all layers, and their attention weights."""
    activations = length * model.n_layers * numbers_per_token(model) + 2 * int(model.hf.config.vocab_size)
    return activations + _attention_weights(model, length)


def _attention_weights(model: Model, length: int) -> int:
    """How many attention weights a forward-backward pass holds for one prompt, before and after the softmax."""
    return 2 * model.n_layers * model.n_heads * length**2

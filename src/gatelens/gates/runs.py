"""Plain runs of a model, and what they capture for gated runs.

Everything here goes through the forward of the Hugging Face model. Hooks skip layers, replace residual streams and
select the positions whose logits are computed, so the remaining arithmetic is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from gatelens.errors import GatelensError
from gatelens.gates.hooks import Hooks
from gatelens.model import Model
from gatelens.runtime.context import Context

LogitsAt = Literal["last", "all"] | Tensor
"""Which logits to compute: at the last real token, at all positions, or where a mask (prompt, position) is True."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one plain run of a model captured.

    Example:
        run = model.capture("Once upon a time")
        run.heads[0].shape  # of the first layer: prompt, position, head, dim
        with model.patch(["L9H6"], run):
            model.hf(run.tokens)
    """

    tokens: Int[Tensor, "prompt position"]  # the tokens that were run
    mask: Shaped[Tensor, "prompt position"] | None  # nonzero for real tokens; None if all tokens are real
    logits: Float[Tensor, "... vocab"]  # of all positions, or of the last one
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
    hooks.before(model.anatomy.unembed, lambda hidden: pick(hidden, mask, logits_at, len(tokens)))
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


def branch(model: Model, layer: int, parents: Int[Tensor, " row"], n_prompts: int, hooks: Hooks) -> None:
    """Let a layer run other rows than the layer below: each of its rows continues one row of the layer below.

    Arguments:
        parents: for each row of the layer, the row of the layer below that it continues.
        n_prompts: how many prompts a row has. Arguments of the layer that are given for each prompt, such as a mask,
            are repeated for each row.
    """

    def continued(hidden: Tensor) -> Tensor:
        if len(hidden) == len(parents) * n_prompts:
            return hidden
        return hidden.unflatten(0, (-1, n_prompts))[parents.to(hidden.device)].flatten(0, 1)

    def repeated(argument: Tensor) -> Tensor:
        return repeat(argument, len(parents)) if argument.ndim > 1 and len(argument) == n_prompts else argument

    hooks.before(model.anatomy.blocks[layer].layer, continued, repeated)


def only_last_position(model: Model, hooks: Hooks) -> None:
    """Compute what the last layer adds to the stream at the last position only, and zeros at all others.

    This is for gated runs of which nothing but the logits at the last position is read. Products of fewer positions are
    rounded differently, so a run with open gates only leaves it out, to reproduce the plain model to the last bit.
    """

    def at_last(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        return nn.functional.pad(own(_last_position(hidden)), (0, 0, hidden.shape[1] - 1, 0))

    _last_layer(model, at_last, hooks)


def only_at(model: Model, logits_at: Bool[Tensor, "prompt position"], hooks: Hooks) -> None:
    """`only_last_position` for the positions at which ``logits_at`` is True, also with gradients and with padding."""

    def at_places(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        places = repeat(logits_at.to(hidden.device), len(hidden) // len(logits_at))
        output = own(hidden[places][None])[0]
        return output.new_zeros(*places.shape, output.shape[-1]).index_put((places,), output)

    _last_layer(model, at_places, hooks)


def _last_layer(model: Model, run: Callable[[Callable[..., Tensor], Tensor], Tensor], hooks: Hooks) -> None:
    """Replace the forward of what the last layer adds to the stream by ``run(forward, hidden)``."""
    for module in (model.anatomy.blocks[-1].out, model.anatomy.blocks[-1].mlp):
        hooks.instead(module, partial(run, module.forward))


def pick(hidden: Tensor, mask: Tensor | None, logits_at: LogitsAt, n_prompts: int) -> Tensor:
    """Select the positions of ``hidden`` (row * prompt, position, width) whose logits are computed."""
    rows = len(hidden) // n_prompts
    if isinstance(logits_at, Tensor):
        return hidden[repeat(logits_at.to(hidden.device), rows)]
    if logits_at == "all":
        return hidden
    if mask is None:
        return _last_position(hidden)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = repeat((mask * places).argmax(-1).to(hidden.device), rows)
    return hidden[torch.arange(len(last), device=hidden.device), last, None]


def _last_position(hidden: Tensor) -> Tensor:
    """The last position of (row * prompt, position, width): (row * prompt, 1, width).

    In half precision it is copied: a linear module of a view with gaps between its rows does not use the fast product
    for bfloat16, and the logits of a vocabulary of 262,208 took 150 times as long. `Tensor.contiguous` would not copy
    the view of one prompt.
    """
    last = hidden[:, -1:]
    return last.clone(memory_format=torch.contiguous_format) if last.dtype.itemsize == 2 else last


def repeat(x: Tensor, rows: int) -> Tensor:
    """Repeat a tensor as a whole along its first axis, ``rows`` times."""
    return x if rows == 1 else x.repeat(rows, *[1] * (x.ndim - 1))


def rows_that_fit(model: Model, tokens: Tensor, n_logits: int, *, grad: bool, context: Context) -> int:
    """How many gate rows of these prompts fit into the memory budget; at least one.

    Arguments:
        n_logits: positions whose logits are computed, over all prompts.
        grad: whether the run keeps activations for a backward pass.
    """
    n_prompts, length = tokens.shape
    return context.fits(run_numbers(model, n_prompts, length, n_logits, grad=grad))


def run_numbers(model: Model, n_prompts: int, length: int, n_logits: int, *, grad: bool) -> int:
    """Peak memory of one gate row of prompts of this length, in numbers.

    Arguments:
        n_logits, grad: as for `rows_that_fit`.
    """
    logits = 2 * n_logits * int(model.hf.config.vocab_size)
    one_layer = n_prompts * length * numbers_per_token(model)
    if not grad:
        return one_layer + logits
    return model.n_layers * one_layer + n_prompts * _attention_weights(model, length) + logits


def numbers_per_token(model: Model) -> int:
    """Peak memory of a forward pass for one token, in numbers: stream, heads and MLP, about twice each."""
    inner = getattr(model.hf.config, "intermediate_size", None) or 4 * model.anatomy.width
    return 8 * model.anatomy.width + 4 * int(inner)


def gradient_numbers(model: Model, length: int) -> int:
    """Peak memory of a forward-backward pass for one prompt, in numbers: all layers, and their attention weights.

    Beside the logits there are their gradients from the right and from the wrong answers, and the sum of both.
    """
    activations = length * model.n_layers * numbers_per_token(model) + 4 * int(model.hf.config.vocab_size)
    return activations + _attention_weights(model, length)


def _attention_weights(model: Model, length: int) -> int:
    """How many attention weights a forward-backward pass holds for one prompt, before and after the softmax."""
    return 2 * model.n_layers * model.n_heads * length**2

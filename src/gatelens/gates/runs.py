"""Plain runs of a model, and what they leave behind for gated ones.

Everything here goes through the Hugging Face model's own forward. Layers are skipped, streams replaced and
logits picked by hooks, so the arithmetic that remains is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.hooks import Hooks
from gatelens.model import Model

LogitsAt = Literal["last", "all"] | Tensor
"""Which positions' logits to compute: the last real token's, all, or where a mask (prompt, position) is True."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one plain run of a model left behind."""

    tokens: Tensor  # (prompt, position)
    mask: Tensor | None  # (prompt, position), True for real tokens; None where all are
    logits: Tensor
    heads: Sequence[Tensor]  # z of each layer: (prompt, position, head, dim)
    streams: Sequence[Tensor]  # input of each layer: (prompt, position, width)


def capture(
    model: Model,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    logits_at: LogitsAt = "last",
    streams: bool = True,
) -> Run:
    """Run the model as it is and keep every head's output and, if asked, every layer's input. Cost: 1 forward."""
    heads: list[Tensor] = []
    kept: list[Tensor] = []
    cut = (model.n_heads, model.anatomy.head_dim)
    with torch.no_grad(), Hooks() as hooks:
        for block in model.anatomy.blocks:
            if streams:
                hooks.before(block.layer, kept.append)
            hooks.before(block.out, lambda z: heads.append(z.unflatten(-1, cut)))
        logits = forward(model, tokens, mask, hooks, logits_at)
    return Run(tokens, mask, logits, heads, kept)


def forward(
    model: Model, tokens: Tensor, mask: Tensor | None, hooks: Hooks, logits_at: LogitsAt, rows: int = 1
) -> Tensor:
    """The model's logits under the hooks that are set: (prompt, vocab), (prompt, position, vocab) or (picked, vocab).

    With several rows the prompts are repeated row by row, and so is the first axis of what comes out.
    """
    if tokens.shape[1] > model.context:
        raise GatelensError(
            f"a prompt of {tokens.shape[1]} tokens does not fit into {model.name}, which reads {model.context}."
        )
    hooks.before(model.anatomy.unembed, lambda hidden: pick(hidden, mask, logits_at, rows))
    inputs: dict[str, Any] = {"input_ids": repeat(tokens.to(model.device), rows), "use_cache": False}
    if mask is not None:
        # Positions count real tokens, or padding on the left would shift every one of them.
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
    """The positions of hidden (row * prompt, position, width) whose logits are wanted."""
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
    """The first axis, repeated as a whole ``rows`` times."""
    return x if rows == 1 else x.repeat(rows, *[1] * (x.ndim - 1))


def rows_that_fit(model: Model, tokens: Tensor, logits: int, *, grad: bool, memory_gb: float | None) -> int:
    """How many rows of these prompts fit into the memory budget (None: there is no limit); at least one."""
    if memory_gb is None:
        return 1 << 30
    per_token = gradient_numbers(model, 1) if grad else moment_numbers(model)
    numbers = tokens.numel() * per_token + 2 * logits * int(model.hf.config.vocab_size)
    if grad:
        numbers += len(tokens) * _attention_numbers(model, tokens.shape[1])
    return max(1, int(memory_gb * 1e9 // (numbers * 4)))


def moment_numbers(model: Model) -> int:
    """How many numbers a run holds for one token at its widest: stream, heads and MLP, about twice each."""
    inner = getattr(model.hf.config, "intermediate_size", None) or 4 * model.anatomy.width
    return 8 * model.anatomy.width + 4 * int(inner)


def gradient_numbers(model: Model, length: int) -> int:
    """How many numbers a run with gradients holds for one prompt: every layer's moment, and attention weights."""
    rest = length * model.n_layers * moment_numbers(model) + 2 * int(model.hf.config.vocab_size)
    return rest + _attention_numbers(model, length)


def _attention_numbers(model: Model, length: int) -> int:
    """How many attention weights a run with gradients holds for one prompt, before and after the softmax."""
    return 2 * model.n_layers * model.n_heads * length**2

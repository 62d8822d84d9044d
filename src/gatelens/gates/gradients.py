"""Forward-backward passes, with the gradients at the places where gates act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.hooks import Edit, Hooks
from gatelens.gates.runs import forward, repeat, skip_to
from gatelens.model import Model
from gatelens.model.anatomy import TransformerBlock
from gatelens.sparse.attention_interface import offset_modules

Metric = Callable[[Tensor], Tensor]
"""Maps logits (prompt, vocab) at the last position to one number for each prompt."""
Change = Callable[[Model, Hooks], None]
"""Registers hooks that change a pass."""


class SourceGroup(NamedTuple):
    """Sources that a path of activations moves together: the embedding, the heads of a layer, or its MLP."""

    kind: Literal["embedding", "heads", "mlp"]
    layer: int = 0


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward-backward pass from which gradients are taken. Without arguments it is the plain clean run.

    Arguments:
        stream: the input of layer `start`, (row * prompt, position, width); None: the model's own embedding.
        start: the first layer that is run; only with a `stream`.
        rows: how many runs of each prompt the pass has, with equal weights. The gradient is their mean.
        changes: register hooks that change the pass, such as the rules of its backward pass.
        hold_norms: gradients treat the scales of norms as constants.
        only: the sources whose scores the pass contributes to; None: all.
    """

    stream: Float[Tensor, "_ position width"] | None = None
    start: int = 0
    rows: int = 1
    changes: Sequence[Change] = ()
    hold_norms: bool = False
    only: SourceGroup | None = None


def differentiate(
    model: Model, tokens: Tensor, metric: Metric, watch: Callable[[Hooks], None], step: Pass | None = None
) -> None:
    """One forward-backward pass. The weights are frozen, so only gradients of activations are computed.

    Arguments:
        metric: its sum over prompts, mean over rows, is differentiated.
        watch: registers the hooks that store gradients. They see what modules compute before the pass changes it.
        step: how the pass differs from a plain one.
    """
    step = step or Pass()
    leaves: list[Tensor] = []

    def begin(stream: Tensor) -> Tensor:
        leaves.append(stream.detach().requires_grad_())
        return leaves[0]

    with torch.enable_grad(), Hooks() as hooks:
        if step.stream is not None:
            skip_to(model, step.start, step.stream.to(model.dtype), hooks)
        hooks.before(model.anatomy.blocks[step.start].layer, begin)
        watch(hooks)
        if step.hold_norms:
            _hold_norms(model, hooks)
        for change in step.changes:
            change(model, hooks)
        logits = forward(model, repeat(tokens, step.rows), None, hooks, "last")
        value = torch.stack([metric(row) for row in logits.chunk(step.rows)]).sum() / step.rows
        torch.autograd.grad(value, leaves, allow_unused=True)


def embeddings(model: Model, tokens: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt position width"]:
    """What the first layer reads. Cost: a forward without layers."""
    streams: list[Tensor] = []
    with torch.no_grad(), Hooks() as hooks:
        for block in model.anatomy.blocks:
            hooks.instead(block.layer, lambda hidden, *args, **kwargs: hidden)
        hooks.before(model.anatomy.blocks[0].layer, streams.append)
        forward(model, tokens, None, hooks, "last")
    return streams[0]


def z_gradients(
    model: Model, tokens: Int[Tensor, "prompt position"], metric: Metric, step: Pass | None = None
) -> dict[int, Float[Tensor, "prompt position head dim"]]:
    """The gradient of the metric at the outputs z of the heads, by layer.

    Layers that the pass skips, or whose heads do not reach the metric, are left out.
    """
    grads: dict[int, Tensor] = {}
    step = step or Pass()

    def watch(hooks: Hooks) -> None:
        for layer, block in enumerate(model.anatomy.blocks):
            hooks.before(block.out, catch(grads, layer))

    differentiate(model, tokens, metric, watch, step)
    cut = (model.n_heads, model.anatomy.head_dim)
    return {layer: sum_rows(grad, step.rows).unflatten(-1, cut) for layer, grad in grads.items()}


def layers_of(step: Pass, gradients: Mapping[int, Tensor]) -> list[int]:
    """The layers with gradients at z whose heads a pass contributes to."""
    if step.only is None:
        return list(gradients)
    return [step.only.layer] if step.only.kind == "heads" and step.only.layer in gradients else []


def sum_rows(gradient: Float[Tensor, "_ position ..."], rows: int) -> Float[Tensor, "prompt position ..."]:
    """The sum over the rows of a pass, of a gradient of the mean over rows."""
    return gradient if rows == 1 else gradient.unflatten(0, (rows, -1)).sum(0)


@dataclass(eq=False)
class InputGradients:
    """What a pass stores for the destinations: their streams, and the gradients after their norms, by layer.

    Gradients of destinations that do not reach the metric are left out.
    """

    streams: dict[int, Tensor] = field(default_factory=dict)  # the attention's input
    mlp_streams: dict[int, Tensor] = field(default_factory=dict)
    finals: dict[int, Tensor] = field(default_factory=dict)
    qkv: list[dict[int, Tensor]] = field(default_factory=list)  # at the outputs of each layer's projections
    offsets: list[dict[int, Tensor]] = field(default_factory=list)  # at the gate offsets of queries and keys, if any
    mlp: dict[int, Tensor] = field(default_factory=dict)  # at the MLP's input, after the norm
    final: dict[int, Tensor] = field(default_factory=dict)  # at the final norm's output

    def watch(self, model: Model, hooks: Hooks) -> None:
        """Register the hooks that fill these fields during a forward-backward pass."""
        for layer, block in enumerate(model.anatomy.blocks):
            self._watch_block(layer, block, hooks)
        hooks.before(model.anatomy.final_norm.part, keep(self.finals, 0))
        hooks.after(model.anatomy.final_norm.part, catch(self.final, 0))

    def _watch_block(self, layer: int, block: TransformerBlock, hooks: Hooks) -> None:
        self.qkv.append({})
        self.offsets.append({})
        hooks.before(block.layer, keep(self.streams, layer))
        for i, offset in enumerate(offset_modules(block.attention) or ()):
            hooks.after(offset, catch(self.offsets[layer], i))
        for i, module in enumerate(block.qkv):
            hooks.after(module, catch(self.qkv[layer], i))
        hooks.before(block.mlp_start, keep(self.mlp_streams, layer))
        hooks.before(block.mlp, catch(self.mlp, layer, shared=True))


def catch(grads: dict[int, Tensor], key: int, shared: bool = False) -> Edit:
    """An edit that does not change the tensor and stores its gradient in ``grads[key]``.

    Arguments:
        shared: True if the tensor is also used elsewhere, like a residual stream that a component reads. Then a view is
            passed on, and only the gradient that comes back through the view is stored. Outputs of modules must not be
            views, because some families change them in place.
    """

    def edit(x: Tensor) -> Tensor:
        seen = x.view_as(x) if shared else x
        if seen.requires_grad:
            seen.register_hook(lambda grad: grads.__setitem__(key, grad))
        return seen

    return edit


def keep(into: dict[int, Tensor], key: int) -> Edit:
    """An edit that does not change the tensor and stores it in ``into[key]``."""
    return lambda x: into.__setitem__(key, x.detach())


def _hold_norms(model: Model, hooks: Hooks) -> None:
    """Let the gradients of a pass treat the scales of all norms of the residual stream as constants."""
    for norm in model.anatomy.norms:
        hooks.instead(norm.part, norm.with_held_scale())

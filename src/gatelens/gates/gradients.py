"""Forward-backward passes from chosen embeddings, with the gradients at the places where gates act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.hooks import Edit, Hooks
from gatelens.gates.runs import forward
from gatelens.model import Model
from gatelens.model.anatomy import TransformerBlock
from gatelens.sparse.in_model import offset_modules

Metric = Callable[[Tensor], Tensor]
"""Maps logits (prompt, vocab) at the last position to one number for each prompt."""


def differentiate(
    model: Model, tokens: Tensor, metric: Metric, watch: Callable[[Hooks], None], embedding: Tensor | None = None
) -> None:
    """One forward-backward pass. The weights are frozen, so only gradients of activations are computed.

    Arguments:
        metric: its sum over prompts is differentiated.
        watch: registers the hooks that store gradients.
        embedding: (prompt, position, width), used instead of the model's own.
    """
    leaves: list[Tensor] = []

    def begin(stream: Tensor) -> Tensor:
        leaves.append((stream if embedding is None else embedding.to(stream)).detach().requires_grad_())
        return leaves[0]

    with torch.enable_grad(), Hooks() as hooks:
        hooks.before(model.anatomy.blocks[0].layer, begin)
        watch(hooks)
        value = metric(forward(model, tokens, None, hooks, "last")).sum()
        torch.autograd.grad(value, leaves)


def z_gradients(
    model: Model, tokens: Int[Tensor, "prompt position"], metric: Metric, embedding: Tensor | None = None
) -> list[Float[Tensor, "prompt position head dim"]]:
    """The gradient of the metric, summed over prompts, at the output z of every head, for each layer."""
    grads: dict[int, Tensor] = {}

    def watch(hooks: Hooks) -> None:
        for layer, block in enumerate(model.anatomy.blocks):
            hooks.before(block.out, catch(grads, layer))

    differentiate(model, tokens, metric, watch, embedding)
    cut = (model.n_heads, model.anatomy.head_dim)
    return [grads[layer].unflatten(-1, cut) for layer in range(model.n_layers)]


@dataclass(eq=False)
class InputGradients:
    """What a forward-backward pass stores for every destination: its stream, and the gradient after its norm."""

    streams: list[Tensor] = field(default_factory=list)  # each layer's attention input
    mlp_streams: list[Tensor] = field(default_factory=list)
    finals: list[Tensor] = field(default_factory=list)
    qkv: list[dict[int, Tensor]] = field(default_factory=list)  # at the outputs of each layer's projections
    offsets: list[dict[int, Tensor]] = field(default_factory=list)  # at the gate offsets of queries and keys, if any
    mlp: dict[int, Tensor] = field(default_factory=dict)  # at each MLP's input, after the norm
    final: dict[int, Tensor] = field(default_factory=dict)  # at the final norm's output

    def watch(self, model: Model, hooks: Hooks) -> None:
        """Register the hooks that fill these fields during a forward-backward pass."""
        for layer, block in enumerate(model.anatomy.blocks):
            self._watch_block(layer, block, hooks)
        hooks.before(model.anatomy.final_norm.part, keep(self.finals))
        hooks.after(model.anatomy.final_norm.part, catch(self.final, 0))

    def _watch_block(self, layer: int, block: TransformerBlock, hooks: Hooks) -> None:
        self.qkv.append({})
        self.offsets.append({})
        hooks.before(block.layer, keep(self.streams))
        for i, offset in enumerate(offset_modules(block.attention) or ()):
            hooks.after(offset, catch(self.offsets[layer], i))
        for i, module in enumerate(block.qkv):
            hooks.after(module, catch(self.qkv[layer], i))
        hooks.before(block.mlp_start, keep(self.mlp_streams))
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
        seen.register_hook(lambda grad: grads.__setitem__(key, grad))
        return seen

    return edit


def keep(into: list[Tensor]) -> Edit:
    """An edit that does not change the tensor and appends it to a list."""
    return lambda x: into.append(x.detach())

"""RelP: relevance patching. The rules of layer-wise relevance propagation take the place of gradients.

The score of a gate is ``(clean - corrupt contribution) . coefficient``, where the coefficients of an input come from a
backward pass on the clean run with these rules:

- the scale of a norm is a constant (LN-rule);
- attention weights are constants, so that queries and keys get nothing (AH-rule);
- an activation function is multiplication by the constant f(x) / x (identity rule);
- in a product of two projections, as in gated MLPs, each factor gets half (half rule).

In other words: the model is replaced by a linear one with the same outputs on the clean prompt, and gates are patched
there exactly. All edges into queries and keys have the score 0. (Jafari, Eberle, Khakzar and Nanda, arXiv 2508.21258.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Pass
from gatelens.gates.hooks import Hooks
from gatelens.gates.level import Level, S
from gatelens.gates.passes import attribute_batches, gate_changes
from gatelens.methods.registry import FORWARD_BACKWARD, GradientSettings, Method, Price, by_keywords, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.precision import widen
from gatelens.tasks.base import CircuitTask

_NEARLY_ZERO = 1e-6  # f(x) / x is taken here for an x that is nearer to 0


def relevance_patching(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    *,
    straight_through: bool = False,
    context: Context | None = None,
) -> S:
    """The score of every gate by relevance patching.

    Arguments:
        straight_through: let coefficients pass through the gates of a sparse model, to the offsets of its queries and
            keys. Attention weights stay constants.

    Returns:
        Scores of the level. Cost: ``level.cost.captures`` forwards and 1 forward-backward pass.
    """
    changes = [hold_attention, hold_activations, halve_products, *gate_changes(straight_through)]

    def scores(attribution: Attribution) -> Tensor:
        return attribution.products(Pass(changes=changes, hold_norms=True))

    return attribute_batches(level, model, task, scores, "relp", context)


def hold_attention(model: Model, hooks: Hooks) -> None:
    """Let gradients treat attention weights as constants."""
    anatomy = model.anatomy

    def hold_fused(output: Tensor) -> Tensor:
        q, k, v = anatomy.unfuse([output])
        return anatomy.fuse(q.detach(), k.detach(), v)[0]

    for block in anatomy.blocks:
        if len(block.qkv) == 1:
            hooks.after(block.qkv[0], hold_fused)
        else:
            for module in block.qkv[:2]:
                hooks.after(module, lambda output: output.detach())


def hold_activations(model: Model, hooks: Hooks) -> None:
    """Let gradients treat every activation function as multiplication by the constant f(x) / x."""
    for block in model.anatomy.blocks:
        activation = model.anatomy.activation(block)
        hooks.instead(activation, _as_multiplication(activation.forward))


def _as_multiplication(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            output, wide = function(x.detach()), widen(x)  # a linear function may return its argument
            near_zero = function(wide.new_tensor([_NEARLY_ZERO])) / _NEARLY_ZERO
            factor = torch.where(wide.abs() < _NEARLY_ZERO, near_zero, output / wide).to(x.dtype)
        linear = x * factor
        return output + (linear - linear.detach())  # the bracket is 0 and carries the gradient

    return forward


def halve_products(model: Model, hooks: Hooks) -> None:
    """Halve the gradients at products of two projections, so that each factor gets half."""
    for block in model.anatomy.blocks:
        projection = model.anatomy.product(block)
        if projection is not None:
            hooks.before(projection, lambda product: 0.5 * (product + product.detach()))


RELP = register(
    Method(
        name="relp",
        score=by_keywords(relevance_patching),
        price=lambda level, settings: Price(level.cost.captures + FORWARD_BACKWARD),
        paper="Jafari et al., arXiv 2508.21258",
        help="relevance rules instead of gradients, on the clean run",
        settings=GradientSettings,
    )
)

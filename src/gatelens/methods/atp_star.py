"""AtP*: attribution patching with two corrections for gates that gradients miss.

- *Saturated attention.* Where a softmax is saturated its gradient is nearly 0, although another query or key can move
  all of its weight. For edges into queries and keys, attention weights are computed again without the edge, and only
  their effect on the metric is linear. Gates of other levels change no query or key and need no correction.
- *Cancellation* (GradDrop). The direct effect of a gate on the metric and its effect through later layers can cancel.
  One backward pass for each layer l leaves out gradients through that layer's attention and MLP, and the score of a
  prompt has the magnitude ``sum over l of |product without layer l| / (layers - 1)``.

The published score is this magnitude, averaged over prompts: use the ranking ``per-prompt`` to have it. Here a prompt's
score also has the sign of its product without GradDrop. (Kramár, Lieberum, Shah and Nanda, arXiv 2403.00745.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Pass, catch
from gatelens.gates.hooks import Hooks
from gatelens.gates.level import Level, S
from gatelens.gates.passes import attribute_batches, gate_changes
from gatelens.methods.registry import FORWARD_BACKWARD, GradientSettings, Method, Price, by_keywords, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask


def attribute_with_corrections(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    *,
    straight_through: bool = False,
    context: Context | None = None,
) -> S:
    """The score of every gate by AtP*.

    Arguments:
        straight_through: let gradients pass through the gates of a sparse model. Recomputed attention weights have the
            gates that open or close with them in any case.

    Returns:
        Scores of the level. Cost: 1 forward-backward pass for each layer, and one more; for edges also the queries and
        keys of every layer without each source.
    """
    changes = gate_changes(straight_through)

    def numbers(length: int) -> int:
        """What is held for a prompt: a pass, and the gradients at z of all passes."""
        stored = (model.n_layers + 1) * model.n_layers * length * model.n_heads * model.anatomy.head_dim
        return level.attribute_numbers(model, length) + stored

    def scores(attribution: Attribution) -> Tensor:
        z_gradients: list[dict[int, Tensor]] = [{} for _ in range(model.n_layers + 1)]
        passes = [Pass(changes=[partial(_store_z, stored), *changes]) for stored in z_gradients]
        drops = [Pass(changes=[*step.changes, partial(drop_layer, n)]) for n, step in enumerate(passes[1:])]
        # 1. Products by gradients: with all layers, which give the sign, and without each layer in turn.
        plain = attribution.products(passes[0])
        magnitude = attribution.products(drops[0]).abs_()
        for step in drops[1:]:
            magnitude += attribution.products(step).abs_()
        # 2. Gates that change queries or keys, with the exact change of the softmax.
        for gates, products in attribution.softmax_products(z_gradients):
            plain[gates] = products[0].to(plain)
            magnitude[gates] = products[1:].abs().sum(0).to(magnitude)
        return plain.sign() * magnitude / max(1, model.n_layers - 1)

    return attribute_batches(level, model, task, scores, "atp-star", context, numbers=numbers)


def drop_layer(layer: int, model: Model, hooks: Hooks) -> None:
    """Leave out gradients through what the attention and the MLP of a layer add to the residual stream."""
    block = model.anatomy.blocks[layer]
    hooks.after(block.out, lambda output: output.detach())
    hooks.after(block.mlp_end, lambda output: output.detach())


def _store_z(z_gradients: dict[int, Tensor], model: Model, hooks: Hooks) -> None:
    for layer, block in enumerate(model.anatomy.blocks):
        hooks.before(block.out, catch(z_gradients, layer))


def _price(level: Level[Any], settings: GradientSettings) -> Price:
    return Price(level.cost.captures + FORWARD_BACKWARD, per_layer=FORWARD_BACKWARD + level.cost.softmax)


ATP_STAR = register(
    Method(
        name="atp-star",
        score=by_keywords(attribute_with_corrections),
        price=_price,
        paper="Kramár et al., arXiv 2403.00745",
        help="gradients corrected for saturated attention and for cancellation",
        levels=("heads", "edges", "attention"),
        settings=GradientSettings,
    )
)

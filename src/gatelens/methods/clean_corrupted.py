"""Clean-corrupted attribution: gradients at both ends of the path of embeddings, and at no point between them.

The score of a gate is ``(clean - corrupt contribution) . gradient``, where the gradient is the mean of that on the
clean run and that on the corrupt run: the trapezoid rule with one step, where EAP-IG has midpoints. (MIB: Mueller et
al., arXiv 2504.13151.)
"""

from __future__ import annotations

from torch import Tensor

from gatelens.gates.attribution import Attribution
from gatelens.gates.level import Level, S
from gatelens.gates.passes import attribute_batches, embedding_path, gate_changes
from gatelens.methods.registry import FORWARD_BACKWARD, GradientSettings, Method, Price, by_keywords, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask


def attribute_both_ends(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    *,
    straight_through: bool = False,
    context: Context | None = None,
) -> S:
    """The score of every gate with the mean gradient of the clean and the corrupt run.

    Arguments:
        straight_through: let gradients pass through the gates of a sparse model.

    Returns:
        Scores of the level. Cost: ``level.cost.captures`` forwards and 2 forward-backward passes.
    """
    changes = gate_changes(straight_through)

    def scores(attribution: Attribution) -> Tensor:
        return attribution.mean_products(embedding_path(model, attribution.batch, [1.0, 0.0], changes))

    return attribute_batches(level, model, task, scores, "clean-corrupted", context)


CLEAN_CORRUPTED = register(
    Method(
        name="clean-corrupted",
        score=by_keywords(attribute_both_ends),
        price=lambda level, settings: Price(level.cost.captures + 2 * FORWARD_BACKWARD),
        paper="Mueller et al., arXiv 2504.13151",
        help="gradients on the clean and on the corrupt run",
        settings=GradientSettings,
    )
)

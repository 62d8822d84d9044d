"""Attribution: score all gates by gradients, at the cost of a few runs.

The score of a gate is ``(clean - corrupt contribution) . d metric / d destination input``, on the clean run
(attribution patching; EAP for edges: Syed et al., arXiv 2310.10348), or with the gradient averaged over points of the
straight path of input embeddings from corrupt to clean (EAP-IG: Hanna et al., arXiv 2403.17806): the midpoints of its
steps, or their left ends, which the authors' package uses. Prompts are summed and divided once, so scores do not depend
on how prompts are split into batches.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates import ATTENTION, EDGES, HEADS
from gatelens.gates.attention import AttentionScores
from gatelens.gates.attribution import Attribution
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.gates.level import Level, S
from gatelens.gates.passes import attribute_batches, embedding_path, gate_changes
from gatelens.methods.registry import FORWARD_BACKWARD, GradientSettings, Method, Price, by_keywords, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

Rule = Literal["midpoint", "left"]
"""Where a step of the path is evaluated: in its middle, or at its end on the side of the corrupt prompt."""


def path_points(steps: int, rule: Rule = "midpoint") -> list[float]:
    """The points at which the path from corrupt (0) to clean (1) is evaluated.

    With the rule ``midpoint``, one step is the clean end only. With ``left``, it is the corrupt end.
    """
    if steps < 1:
        raise GatelensError(f"steps is {steps}: it must be at least 1. 1 is plain attribution, more are EAP-IG.")
    if rule == "left":
        return [step / steps for step in range(steps)]
    return [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]


def attribute(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    steps: int = 1,
    *,
    rule: Rule = "midpoint",
    straight_through: bool = False,
    context: Context | None = None,
) -> S:
    """The score of every gate of a level by attribution.

    Arguments:
        steps: with 1, gradients are taken on the clean run; with more, they are averaged over as many steps on the path
            of embeddings from corrupt to clean.
        rule: where each step is evaluated; ``left`` gives the scores of EAP-IG's package.
        straight_through: let gradients pass through the gates of a sparse model.

    Returns:
        Scores of the level. Cost: ``level.cost.captures`` forwards and ``steps`` forward-backward passes.

    Example:
        scores = gatelens.attribute(gatelens.gates.HEADS, model, task, steps=5)
    """
    points, changes = path_points(steps, rule), gate_changes(straight_through)

    def scores(attribution: Attribution) -> Tensor:
        return attribution.mean_products(embedding_path(model, attribution.batch, points, changes))

    method = "eap" if points == [1.0] else f"eap-ig ({steps} steps{', left points' if rule == 'left' else ''})"
    return attribute_batches(level, model, task, scores, method, context)


def attribute_heads(
    model: Model, task: CircuitTask, steps: int = 1, *, rule: Rule = "midpoint", context: Context | None = None
) -> HeadScores:
    """`attribute` at the level of heads: (clean z - corrupt z) . d metric / d z.

    Arguments:
        steps, rule: as for `attribute`.

    Example:
        scores = gatelens.attribute_heads(model, task, steps=5)
        scores.plot()
    """
    return attribute(HEADS, model, task, steps, rule=rule, context=context)


def attribute_edges(
    model: Model, task: CircuitTask, steps: int = 1, *, rule: Rule = "midpoint", context: Context | None = None
) -> EdgeScores:
    """`attribute` at the level of edges: EAP for one step, EAP-IG for several. One step shares the clean forward.

    Arguments:
        steps, rule: as for `attribute`.

    Example:
        eap = gatelens.attribute_edges(model, task)
        eap_ig = gatelens.attribute_edges(model, task, steps=5)
    """
    return attribute(EDGES, model, task, steps, rule=rule, context=context)


def attribute_attention(
    model: Model, task: CircuitTask, steps: int = 1, *, rule: Rule = "midpoint", context: Context | None = None
) -> AttentionScores:
    """`attribute` at the level of attention edges: (p_ij v_j - corrupt p_ij v_j) . d metric / d z_i.

    Memory: (T, T) numbers for each head, where T is the number of tokens.

    Arguments:
        steps, rule: as for `attribute`.

    Example:
        scores = gatelens.attribute_attention(model, task)
        scores.top(3)[0].name  # "prompt 0: L5H1, query 14 <- key 3"
    """
    return attribute(ATTENTION, model, task, steps, rule=rule, context=context)


class PathSettings(GradientSettings):
    """Settings of EAP-IG."""

    steps: int = Field(default=5, ge=1, description="points of the path from corrupt to clean")
    rule: Rule = Field(
        default="midpoint", description="where a step is evaluated: midpoint, or left as in the package EAP-IG"
    )


def _price(level: Level[Any], settings: GradientSettings) -> Price:
    return Price(level.cost.captures + FORWARD_BACKWARD * getattr(settings, "steps", 1))


EAP = register(
    Method(
        name="eap",
        score=by_keywords(attribute),
        price=_price,
        paper="Syed et al., arXiv 2310.10348",
        help="attribution patching: gradients on the clean run",
        settings=GradientSettings,
    )
)
EAP_IG = register(
    Method(
        name="eap-ig",
        score=by_keywords(attribute),
        price=_price,
        paper="Hanna et al., arXiv 2403.17806",
        help="gradients averaged along the path of embeddings",
        settings=PathSettings,
    )
)

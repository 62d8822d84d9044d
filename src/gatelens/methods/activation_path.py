"""EAP-IG on activations: gradients along a path of each component's own activation, not of the embeddings.

For each group of sources (the embedding, the heads of a layer, an MLP), only the outputs of this group move on the
straight path from their corrupt to their clean values, and the rest of the clean run follows. The score of an edge is
``(clean - corrupt output of the source) . d metric / d destination input``, with the gradient averaged over midpoints
of the path of its source. So the scores of a group's edges add up to what the metric loses when the group is set to its
corrupt outputs, up to the error of the midpoint rule. (EAP-IG-activations in MIB: Mueller et al., arXiv 2504.13151,
after Marks et al., arXiv 2403.19647. The code released with EAP-IG gives every edge the mean gradient of the paths of
all groups; here an edge has the path of its own source.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Change, Pass, SourceGroup
from gatelens.gates.hooks import Hooks
from gatelens.gates.level import Level, S
from gatelens.gates.passes import attribute_batches, gate_changes
from gatelens.gates.runs import forward, repeat
from gatelens.methods.registry import FORWARD_BACKWARD, GradientSettings, Method, Price, by_keywords, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

_SHARE_ABOVE = 0.5  # a path runs the layers above its source only: half of the model on average


def attribute_activations(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    steps: int = 5,
    *,
    straight_through: bool = False,
    context: Context | None = None,
) -> S:
    """The score of every gate with gradients along the path of its source's activation.

    Arguments:
        steps: midpoints of each path. They are rows of one pass if they fit into memory together.
        straight_through: let gradients pass through the gates of a sparse model.

    Returns:
        Scores of the level. Cost: ``steps`` forward-backward passes of the layers above each group of sources; a level
        with gates on MLPs has two groups for each layer.
    """
    context = context or Context()
    changes = gate_changes(straight_through)

    def numbers(length: int, rows: int) -> int:
        return rows * level.attribute_numbers(model, length)

    longest = max(bucket.clean.shape[1] for bucket in task.buckets)
    rows = min(steps, context.fits(numbers(longest, 1)))

    def scores(attribution: Attribution) -> Tensor:
        path = ActivationPath(model, attribution, steps, rows, changes)
        groups = iter(attribution.groups())
        total = path.scores(next(groups))
        for group in groups:
            total += path.scores(group)
        return total

    method = f"eap-ig-activations ({steps} steps)"
    return attribute_batches(level, model, task, scores, method, context, numbers=partial(numbers, rows=rows))


@dataclass(frozen=True, eq=False)
class _Activations:
    """What a plain run computed, by layer."""

    streams: list[Float[Tensor, "prompt position width"]]  # the input of each layer
    heads: list[Float[Tensor, "prompt position _"]]  # the outputs z of its heads
    mlps: list[Float[Tensor, "prompt position width"]]  # what its MLP adds to the stream

    @classmethod
    @torch.no_grad()
    def capture(cls, model: Model, tokens: Tensor) -> _Activations:
        captured = cls([], [], [])
        with Hooks() as hooks:
            for block in model.anatomy.blocks:
                hooks.before(block.layer, captured.streams.append)
                hooks.before(block.out, captured.heads.append)
                hooks.after(block.mlp_end, captured.mlps.append)
            forward(model, tokens, None, hooks, "last")
        return captured

    def of(self, group: SourceGroup) -> Tensor:
        """The activation that the path of a group moves."""
        by_kind = {"embedding": self.streams, "heads": self.heads, "mlp": self.mlps}
        return by_kind[group.kind][group.layer]


class ActivationPath:
    """The paths of all groups on one batch."""

    def __init__(
        self, model: Model, attribution: Attribution, steps: int, rows: int, changes: Sequence[Change]
    ) -> None:
        self.model, self.attribution, self.changes = model, attribution, changes
        self.points = (torch.arange(steps, device=model.device) + 0.5) / steps
        self.rows = rows
        batch = attribution.batch
        self.clean, self.corrupt = (_Activations.capture(model, tokens) for tokens in (batch.clean, batch.corrupt))

    def scores(self, group: SourceGroup) -> Tensor:
        """The scores of the gates of one group's sources: (prompt, ...); 0 for all others."""
        total = torch.zeros(())
        for part in self.points.split(self.rows):
            share = len(part) / len(self.points)
            total = total + share * self.attribution.products(self._pass(group, part))
        return total

    def _pass(self, group: SourceGroup, points: Tensor) -> Pass:
        """The pass in which the group is at some points of its path, and everything below it is as in the clean run."""
        clean, corrupt, rows = self.clean.of(group), self.corrupt.of(group), len(points)
        moved = (corrupt + points.to(clean)[:, None, None, None] * (clean - corrupt)).flatten(0, 1)
        if group.kind == "embedding":
            return Pass(stream=moved, rows=rows, changes=self.changes, only=group)
        stream = repeat(self.clean.streams[group.layer], rows)
        changes: list[Change] = [*self.changes, partial(_move, group, moved)]
        return Pass(stream=stream, start=group.layer, rows=rows, changes=changes, only=group)


def _move(group: SourceGroup, moved: Tensor, model: Model, hooks: Hooks) -> None:
    """Set the output of a group to a point of its path. Gradients pass, so that those at the output are stored."""
    block = model.anatomy.blocks[group.layer]

    def edit(own: Tensor) -> Tensor:
        return moved.to(own) + (own - own.detach())  # the bracket is 0 and carries the gradient

    if group.kind == "heads":
        hooks.before(block.out, edit)
    else:
        hooks.after(block.mlp_end, edit)


class ActivationPathSettings(GradientSettings):
    """Settings of EAP-IG on activations."""

    steps: int = Field(default=5, ge=1, description="points of each component's path from corrupt to clean")


def _price(level: Level[Any], settings: ActivationPathSettings) -> Price:
    per_layer = level.cost.paths * settings.steps * FORWARD_BACKWARD * _SHARE_ABOVE
    return Price(level.cost.captures + 2, per_layer=per_layer)


EAP_IG_ACTIVATIONS = register(
    Method(
        name="eap-ig-activations",
        score=by_keywords(attribute_activations),
        price=_price,
        paper="Mueller et al., arXiv 2504.13151",
        help="gradients averaged along a path of each component's activation",
        settings=ActivationPathSettings,
    )
)

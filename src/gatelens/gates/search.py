"""How far circuits are from the whole model: what methods that search for a circuit minimise."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.level import Level
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.precision import widen
from gatelens.runtime.settings import Settings
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches

Objective = Literal["kl", "metric"]
"""How far a circuit is from the whole model: by the KL divergence of its answer, in nats, or by its metric."""


class SearchSettings(Settings):
    """The settings that all methods that search for a circuit share."""

    objective: Objective = Field(
        default="kl",
        description="what a circuit should not change: the distribution of the next token (kl), or the metric",
    )


def distances(
    objective: Objective,
    task: CircuitTask,
    batch: Bucket,
    logits: Float[Tensor, "row prompt vocab"],
    clean: Float[Tensor, "prompt vocab"],
) -> Float[Tensor, "row prompt"]:
    """How far the answers of circuits are from that of the whole model, on each prompt; 0 if they are equal.

    Arguments:
        objective: ``kl`` is the KL divergence of the circuit from the whole model at the last position, in nats;
            ``metric`` is the absolute difference of the metric.
        logits: of circuits, at the last position.
        clean: of the whole model.
    """
    if objective == "metric":
        return (task.metric(logits, batch) - task.metric(clean, batch)).abs()
    ours, target = widen(logits).log_softmax(-1), widen(clean).log_softmax(-1)
    return (target.exp() * (target - ours)).sum(-1)


class Distance:
    """The distance of circuits from the whole model, mean over the prompts of a task (`distances`).

    Closed gates read the corrupt run. Layers below the first closed gate are not run again: they equal those of the
    clean run. The clean and the corrupt run of a batch are cached as far as they fit into the memory budget.
    """

    def __init__(
        self, level: Level[Any], model: Model, task: CircuitTask, objective: Objective, context: Context
    ) -> None:
        self.level, self.model, self.task, self.objective, self.context = level, model, task, objective, context

        def numbers(length: int) -> int:
            return level.rows_at_once(model) * level.row_numbers(model, length) + cached(length)

        def cached(length: int) -> int:
            return 2 * level.closed_numbers(model, length)

        self.batches = batches(task, numbers, context)
        largest = max(len(batch) * cached(batch.clean.shape[1]) for batch in self.batches)
        self.runs: Callable[[int], tuple[Any, Any]] = lru_cache(maxsize=context.fits(largest))(self._runs)

    def __call__(self, gates: Bool[Tensor, "row ..."]) -> Float[Tensor, " row"]:
        """The distance of each row of gates. Cost of a row: the layers from its first closed gate to the logits."""
        total = torch.zeros(len(gates), dtype=torch.float64)
        for number, batch in enumerate(self.batches):
            clean, corrupt = self.runs(number)
            level = self.level.on(self.task, batch)
            logits = level.run(self.model, batch.clean, gates, corrupt, start=clean, context=self.context)
            total += distances(self.objective, self.task, batch, logits, clean.logits).sum(1).cpu()
        if not total.isfinite().all():
            raise GatelensError(
                "the distance of a circuit from the whole model is not a finite number: load the model in a wider "
                "dtype, or check that its weights are complete."
            )
        return total / len(self.task)

    def _runs(self, number: int) -> tuple[Any, Any]:
        """The clean run of a batch, and what closed gates read."""
        batch = self.batches[number]
        clean, corrupt = (self.level.capture(self.model, tokens) for tokens in (batch.clean, batch.corrupt))
        return clean, self.level.reads(corrupt)

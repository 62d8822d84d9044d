"""The level of heads: a gate mixes a head's output with a source.

The gates are (row, layer, head). The embedding and the MLPs always run on the clean prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Metric, Pass, SourceGroup, layers_of, z_gradients
from gatelens.gates.head_runs import HeadSource, run_heads
from gatelens.gates.level import Cost, Source, fine_grid
from gatelens.gates.optimal import fit_head_constants
from gatelens.gates.runs import Run, capture, gradient_numbers, numbers_per_token
from gatelens.gates.shared_level import ScoreTensors, SharedLevel, SharedScores
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.precision import widen
from gatelens.tasks.base import Bucket


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(SharedScores):
    """How much each head matters for a task, in units of the metric, mean over prompts.

    Example:
        scores = gatelens.attribute_heads(model, task)
        scores.scores[3, 6]  # of the head L3H6
    """

    scores: Shaped[Tensor, "layer head"]
    method: str
    measured: Bool[Tensor, "layer head"] | None = None
    magnitudes: Shaped[Tensor, "layer head"] | None = None
    errors: Shaped[Tensor, "layer head"] | None = None

    @property
    def level(self) -> Heads:
        return HEADS

    def gate(self, number: int, position: int) -> tuple[Head, str]:
        head = Head(*divmod(position, self.scores.shape[1]))
        return head, str(head)

    def by_head(self) -> Float[Tensor, "layer head"]:
        return self.scores


class HeadAttribution(Attribution):
    """The products (clean z - corrupt z) . d metric / d z of all heads."""

    def __init__(self, model: Model, batch: Bucket, metric: Metric) -> None:
        super().__init__(model, batch, metric)
        clean, corrupt = (capture(model, tokens, streams=False).heads for tokens in (batch.clean, batch.corrupt))
        self.differences = [widen(z) - widen(corrupt_z) for z, corrupt_z in zip(clean, corrupt, strict=True)]

    def products(self, step: Pass) -> Shaped[Tensor, "prompt layer head"]:
        gradients = z_gradients(self.model, self.batch.clean, self.metric, step)
        products = torch.zeros(len(self.batch), self.model.n_layers, self.model.n_heads, dtype=self.model.wide_dtype)
        for layer in layers_of(step, gradients):
            change, gradient = self.differences[layer], widen(gradients[layer])
            products[:, layer] = torch.einsum("pthd,pthd->ph", change, gradient).cpu()
        return products

    def groups(self) -> list[SourceGroup]:
        return [SourceGroup("heads", layer) for layer in range(self.model.n_layers)]


class Heads(SharedLevel[HeadScores]):
    """Gates on heads."""

    name, noun = "heads", "heads"
    sources = ("corrupt", "mean", "zero", "optimal")
    cost = Cost(captures=2, patch=0.5, circuit=1.0)
    log_axis, head_map = False, "score of the head"

    def shape(self, model: Model, length: int) -> tuple[int, ...]:
        return model.n_layers, model.n_heads

    def n_gates(self, graph: Graph, length: int) -> int:
        return graph.n_layers * graph.n_heads

    def positions(self, model: Model, *runs: Run) -> list[Int[Tensor, " _gate"]]:
        return [torch.arange(model.n_layers * model.n_heads)]

    def grid(self, total: int, points: int = 0) -> list[int]:
        """Neighbours differ by one head or by at most 5 %; if ``points`` is given, evenly spaced numbers."""
        if not points:
            return fine_grid(total)
        return sorted({round(i * total / (points - 1)) for i in range(points)})

    def capture(self, model: Model, tokens: Int[Tensor, "prompt position"]) -> Run:
        return capture(model, tokens)

    def closed(
        self, model: Model, tokens: Int[Tensor, "prompt position"], source: Source, mean: Callable[[], Any]
    ) -> HeadSource:
        if source == "zero":
            return None
        heads: HeadSource = capture(model, tokens, streams=False).heads if source == "corrupt" else mean()
        return heads

    def mean(self, model: Model, batches: Iterable[Int[Tensor, "_prompt _position"]]) -> HeadSource:
        runs = [capture(model, tokens, streams=False).heads for tokens in batches]
        return [torch.cat([run[layer].flatten(0, 1) for run in runs]).mean(0) for layer in range(model.n_layers)]

    def optimal(self, model: Model, batches: Sequence[Bucket], context: Context) -> HeadSource:
        means = self.mean(model, [batch.corrupt for batch in batches])
        assert means is not None
        return list(fit_head_constants(model, batches, torch.stack(list(means)), context).unbind(0))

    def reads(self, run: Run) -> HeadSource:
        return run.heads

    def run(
        self,
        model: Model,
        tokens: Int[Tensor, "prompt position"],
        gates: Shaped[Tensor, "row layer head"],
        closed: HeadSource,
        *,
        start: Run | None = None,
        context: Context,
    ) -> Float[Tensor, "row prompt vocab"]:
        return run_heads(model, tokens, widen(gates), closed, start=start, context=context)

    def attribution(self, model: Model, batch: Bucket, metric: Metric) -> HeadAttribution:
        return HeadAttribution(model, batch, metric)

    def make_scores(self, graph: Graph, method: str, tensors: ScoreTensors) -> HeadScores:
        return HeadScores(tensors.scores, method, *tensors[1:])

    def row_numbers(self, model: Model, length: int) -> int:
        return length * numbers_per_token(model)

    def learned_numbers(self, model: Model, length: int) -> int:
        return gradient_numbers(model, length)

    def closed_numbers(self, model: Model, length: int) -> int:
        return 3 * self.row_numbers(model, length)

    def attribute_numbers(self, model: Model, length: int) -> int:
        z = length * model.n_layers * model.n_heads * model.anatomy.head_dim
        return gradient_numbers(model, length) + 3 * z  # of the clean and the corrupt run, and their difference

    def rows_at_once(self, model: Model) -> int:
        """The heads of one layer. Larger batches do not fit into the processor's cache and are not faster."""
        return model.n_heads


HEADS = Heads()

"""Greedy pruning of heads: close the head that matters least in the circuit that is left, and repeat.

In every round each open head is closed alone, and the one without which the circuit stays closest to the whole model is
closed for good. (Heads are pruned one after the other in Michel et al., arXiv 1905.10650, in an order that is estimated
once from gradients; here it is measured anew in every round.)

The circuit of a round runs once. A test then starts from its stream at the layer of the head that it closes, so that
the layers below are not run again.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from gatelens.gates import HEADS
from gatelens.gates.head_runs import capture_circuit, run_heads
from gatelens.gates.heads import HeadScores
from gatelens.gates.search import Distance, SearchSettings, distances
from gatelens.gates.shared_level import ScoreTensors
from gatelens.methods.registry import Method, MethodSettings, Price, register
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask


class GreedyPruningSettings(SearchSettings, MethodSettings):
    """Settings of greedy pruning."""

    drop: int = Field(default=1, ge=1, description="heads that are closed in each round")


def prune_heads(
    model: Model,
    task: CircuitTask,
    settings: GreedyPruningSettings | None = None,
    *,
    context: Context | None = None,
) -> HeadScores:
    """Scores of heads by greedy pruning.

    The score is the share of the heads that are closed when this head is closed, itself included: from 1 / n for the
    head that is closed first to 1 for the last one. So the top k are the circuit that is left with k heads. A score is
    not in units of the metric, and it is never negative.

    Returns:
        (layer, head) scores. Cost: for n heads about n^2 / (2 drop) tests of half a forward each.
    """
    return _Pruning(model, task, settings or GreedyPruningSettings(), context or Context()).scores()


class _Pruning:
    """One call of `prune_heads`. Heads are positions in the flattened (layer, head)."""

    def __init__(self, model: Model, task: CircuitTask, settings: GreedyPruningSettings, context: Context) -> None:
        self.model, self.task, self.settings, self.context = model, task, settings, context
        self.shape = HEADS.shape(model, 0)
        self.distance = Distance(HEADS, model, task, settings.objective, context)

    def scores(self) -> HeadScores:
        n_heads, drop = self.model.n_layers * self.model.n_heads, self.settings.drop
        n_rounds, n_batches = -(-n_heads // drop), len(self.distance.batches)
        circuit = torch.ones(n_heads, dtype=torch.bool)
        order: list[int] = []  # closed heads, the first one first
        self.context.begin("prune heads", n_rounds * n_batches)
        for number in range(n_rounds):
            heads = circuit.nonzero()[:, 0]
            without = torch.zeros(len(heads), dtype=torch.float64)
            for batch in range(n_batches):
                without += self.context.piece(f"heads-{number}-{batch}", partial(self._test, circuit, heads, batch))
            order += heads[without.argsort(stable=True)[:drop]].tolist()
            circuit[order[-drop:]] = False
        scores = torch.zeros(n_heads, dtype=self.model.wide_dtype)
        scores[order] = torch.arange(1, n_heads + 1, dtype=scores.dtype) / n_heads
        scores = scores.view(self.shape)
        tensors = ScoreTensors(scores, magnitudes=scores)
        return HEADS.make_scores(Graph.of(self.model.anatomy), "greedy-pruning", tensors)

    def _test(self, circuit: Bool[Tensor, " head"], heads: Int[Tensor, " row"], number: int) -> Float[Tensor, " row"]:
        """The distance of the circuit without each of the heads from the whole model, summed over one batch."""
        batch, (clean, corrupt) = self.distance.batches[number], self.distance.runs(number)
        gates = circuit.to(self.model.wide_dtype)
        start_gates = gates.view(self.shape)
        start = capture_circuit(self.model, batch.clean, start_gates, corrupt)
        sums: list[Tensor] = []
        for tested in heads.split(HEADS.rows_at_once(self.model)):
            rows = gates.repeat(len(tested), 1).scatter_(1, tested[:, None], 0).unflatten(1, self.shape)
            logits = run_heads(
                self.model, batch.clean, rows, corrupt, start=start, start_gates=start_gates, context=self.context
            )
            sums.append(distances(self.settings.objective, self.task, batch, logits, clean.logits).sum(1))
        return torch.cat(sums).double()


GREEDY_PRUNING = register(
    Method(
        name="greedy-pruning",
        score=lambda level, model, task, settings, context: prune_heads(model, task, settings, context=context),
        price=lambda level, settings: Price(
            each=2, per_gate=1 / settings.drop, per_gate_squared=HEADS.cost.patch / 2 / settings.drop
        ),
        paper="Michel et al., arXiv 1905.10650",
        help="close the head that matters least, and repeat",
        levels=("heads",),
        settings=GreedyPruningSettings,
    )
)

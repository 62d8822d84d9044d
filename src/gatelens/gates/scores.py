"""What the methods return: one number for each gate.

The sign is the same everywhere: the score of a gate is how much the metric falls when the gate is closed, so a
positive score helps the task. Rankings go by absolute value unless asked otherwise: ranking by the signed score
keeps only what helps, and such circuits overshoot the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gatelens.model.components import Head
from gatelens.model.graph import Graph

Ranking = Literal["absolute", "signed"]


def rank(scores: Tensor, by: Ranking = "absolute") -> Tensor:
    """Places of the scores from best to worst: (n,). Ties stand in their own order, so it is the same everywhere."""
    return torch.argsort(scores.abs() if by == "absolute" else scores, descending=True, stable=True)


@dataclass(frozen=True, eq=False)
class HeadScores:
    """How much each head matters for a task: scores (layer, head), in units of the metric, mean over prompts.

    measured: bool (layer, head) where only a sample was scored; None if all heads were.
    """

    scores: Tensor
    method: str
    measured: Tensor | None = None

    def top(self, k: int, by: Ranking = "absolute") -> list[Head]:
        """The k best heads, the best first."""
        places = rank(self.scores.flatten(), by)[:k].tolist()
        return [Head(*divmod(place, self.scores.shape[1])) for place in places]


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """How much each edge between components matters: scores (source, destination), 0 where there is no edge.

    measured: bool (source, destination) where only a sample was scored; None if all edges were.
    """

    scores: Tensor
    graph: Graph
    method: str
    measured: Tensor | None = None

    def top(self, k: int, by: Ranking = "absolute") -> list[tuple[str, float]]:
        """The k best edges by name, the best first, with their scores."""
        sources, destinations = self.graph.edges.nonzero(as_tuple=True)
        values = self.scores[sources, destinations]
        return [
            (
                f"{self.graph.source_names[sources[i]]} -> {self.graph.destination_names[destinations[i]]}",
                float(values[i]),
            )
            for i in rank(values, by)[:k].tolist()
        ]


@dataclass(frozen=True, eq=False)
class AttentionScores:
    """How much each attention edge of each prompt matters, for each bucket of the task.

    scores: for each bucket (prompt, layer, head, query, key); edges: the same shapes, True where there is an edge:
    the key is visible to the query and, in a sparse model, the gate is open. Where only a sample was scored, the
    edges are those of the sample.
    """

    scores: Sequence[Tensor]
    edges: Sequence[Tensor]
    method: str
    sampled: bool = False


Scores = HeadScores | EdgeScores | AttentionScores

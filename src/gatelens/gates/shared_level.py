"""Levels whose gates are the same for all prompts, such as heads and edges: one ranking, one tensor of scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.gates.level import Level, PatchedGates, Ranking, Scores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask


class SharedScores(Scores):
    """Scores of gates that all prompts share, so that there is one gate set."""

    scores: Tensor  # one number for each gate
    measured: Tensor | None  # where a gate was scored; None: all gates were

    @property
    def is_sample(self) -> bool:
        return self.measured is not None

    def tensors(self) -> dict[str, Tensor]:
        return {"scores": self.scores, **({} if self.measured is None else {"measured": self.measured})}

    def membership(self, k: int, by: Ranking = "absolute") -> Float[Tensor, " gate"]:
        """1 for each gate among the top k, 0 for all others."""
        [gate_set], [order] = self.gate_sets(), self.orders(by)
        members = torch.zeros(gate_set.scores.numel())
        members[order[:k]] = 1
        return members[gate_set.exists.flatten()]


S = TypeVar("S", bound=SharedScores)


class SharedLevel(Level[S]):
    """A level whose gates all prompts share. A subclass says how to make its scores (`make_scores`)."""

    shared = True

    @abstractmethod
    def make_scores(self, graph: Graph, scores: Tensor, method: str, measured: Tensor | None = None) -> S:
        """The scores of this level, mean over prompts.

        Arguments:
            scores: of the shape of the gates.
            measured: where a gate was scored, of the same shape; None: all gates were.
        """

    def attributed(self, model: Model, task: CircuitTask, pieces: Sequence[Tensor], method: str) -> S:
        mean = torch.stack(list(pieces)).sum(0) / len(task)
        return self.make_scores(Graph.of(model.anatomy), mean, method)

    def patched(self, model: Model, task: CircuitTask, gates: PatchedGates) -> S:
        shape = self.shape(model, 0)
        measured = gates.measured[0].view(shape) if gates.is_sample else None
        return self.make_scores(Graph.of(model.anatomy), gates.scores[0].view(shape), gates.method, measured)

    def read_scores(self, tensors: Mapping[str, Tensor], graph: Graph, method: str) -> S:
        return self.make_scores(graph, tensors["scores"], method, tensors.get("measured"))

"""Levels whose gates are the same for all prompts, such as heads and edges: one ranking, one tensor of scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.attribution import standard_errors
from gatelens.gates.level import Level, PatchedGates
from gatelens.gates.scores import GateSet, Scores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask


class SharedScores(Scores):
    """Scores of gates that all prompts share, so that there is one gate set."""

    scores: Tensor  # one number for each gate, mean over prompts
    measured: Tensor | None  # where a gate was scored; None: all gates were
    magnitudes: Tensor | None  # the absolute score of each gate, mean over prompts; None: not known
    errors: Tensor | None  # the standard error of each score, over prompts; None: not known

    @property
    def is_sample(self) -> bool:
        return self.measured is not None

    def exists(self) -> Tensor:
        """Where there is a gate: by default everywhere."""
        return torch.ones_like(self.scores, dtype=torch.bool)

    def gate_sets(self) -> list[GateSet]:
        exists = self.exists() if self.measured is None else self.measured
        return [GateSet(self.scores, exists, self.magnitudes, self.errors)]

    def tensors(self) -> dict[str, Tensor]:
        names = ("scores", "measured", "magnitudes", "errors")
        named = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def membership(self, k: int, orders: Sequence[Int[Tensor, " _gate"]]) -> Float[Tensor, " gate"]:
        """1 for each gate among the first k, 0 for all others."""
        [gate_set], [order] = self.gate_sets(), orders
        members = torch.zeros(gate_set.scores.numel())
        members[order[:k]] = 1
        return members[gate_set.exists.flatten()]


S = TypeVar("S", bound=SharedScores)


class SharedLevel(Level[S]):
    """A level whose gates all prompts share. A subclass says how to make its scores (`make_scores`)."""

    shared = True

    @abstractmethod
    def make_scores(
        self,
        graph: Graph,
        scores: Tensor,
        method: str,
        measured: Tensor | None = None,
        magnitudes: Tensor | None = None,
        errors: Tensor | None = None,
    ) -> S:
        """The scores of this level, mean over prompts. All tensors have the shape of the gates.

        Arguments:
            measured: where a gate was scored; None: all gates were.
            magnitudes: the absolute scores, mean over prompts; None: not known.
            errors: the standard errors of the scores, over prompts; None: not known.
        """

    def attributed(self, model: Model, task: CircuitTask, pieces: Sequence[Tensor], method: str) -> S:
        scores, magnitudes, squares = torch.stack(list(pieces)).sum(0) / len(task)
        errors = standard_errors(scores, squares, len(task))
        return self.make_scores(Graph.of(model.anatomy), scores, method, magnitudes=magnitudes, errors=errors)

    def patched(self, model: Model, task: CircuitTask, gates: PatchedGates) -> S:
        scores, magnitudes, measured = (
            flat[0].view(self.shape(model, 0)) for flat in (gates.scores, gates.magnitudes, gates.measured)
        )
        where = measured if gates.is_sample else None
        errors = None if gates.errors[0] is None else gates.errors[0].view_as(scores)
        return self.make_scores(Graph.of(model.anatomy), scores, gates.method, where, magnitudes, errors)

    def read_scores(self, tensors: Mapping[str, Tensor], graph: Graph, method: str) -> S:
        others = (tensors.get(name) for name in ("measured", "magnitudes", "errors"))
        return self.make_scores(graph, tensors["scores"], method, *others)

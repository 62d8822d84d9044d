"""Levels whose gates are the same for all prompts, such as heads and edges: one ranking, one tensor of scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.attribution import standard_errors
from gatelens.gates.level import Level, PatchedGates
from gatelens.gates.scores import GateSet, Scores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask


class ScoreTensors(NamedTuple):
    """What is known of the gates of a level. All tensors have the shape of the gates.

    Attributes:
        scores: one number for each gate, mean over prompts.
        measured: where a gate was scored; None: all gates were.
        magnitudes: the absolute score of each gate, mean over prompts; None: not known.
        errors: the standard error of each score, over prompts; None: not known.
    """

    scores: Tensor
    measured: Tensor | None = None
    magnitudes: Tensor | None = None
    errors: Tensor | None = None


class SharedScores(Scores):
    """Scores of gates that all prompts share, so that there is one gate set.

    A subclass has the tensors of `ScoreTensors`, which says what they mean, as fields.
    """

    scores: Tensor
    measured: Tensor | None
    magnitudes: Tensor | None
    errors: Tensor | None

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
        named = {name: getattr(self, name) for name in ScoreTensors._fields}
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
    def make_scores(self, graph: Graph, method: str, tensors: ScoreTensors) -> S:
        """The scores of this level, from tensors that have the shape of its gates."""

    def attributed(self, model: Model, task: CircuitTask, pieces: Iterable[Tensor], method: str) -> S:
        total = torch.zeros(())
        for piece in pieces:
            total = total + piece
        scores, magnitudes, squares = total / len(task)
        errors = standard_errors(scores, squares, len(task))
        tensors = ScoreTensors(scores, magnitudes=magnitudes, errors=errors)
        return self.make_scores(Graph.of(model.anatomy), method, tensors)

    def patched(self, model: Model, task: CircuitTask, gates: PatchedGates) -> S:
        scores, magnitudes, measured = (
            flat[0].view(self.shape(model, 0)) for flat in (gates.scores, gates.magnitudes, gates.measured)
        )
        where = measured if gates.is_sample else None
        errors = None if gates.errors[0] is None else gates.errors[0].view_as(scores)
        return self.make_scores(Graph.of(model.anatomy), gates.method, ScoreTensors(scores, where, magnitudes, errors))

    def read_scores(self, tensors: Mapping[str, Tensor], graph: Graph, method: str) -> S:
        others = (tensors.get(name) for name in ScoreTensors._fields[1:])
        return self.make_scores(graph, method, ScoreTensors(tensors["scores"], *others))

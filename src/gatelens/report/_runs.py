"""Saved runs in memory: what the figures and the page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gatelens.gates import EDGES
from gatelens.gates.role_edges import RoleEdgeScores
from gatelens.gates.scores import Scores
from gatelens.gates.selection import selected
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.example import ExamplePrompt
from gatelens.measures.roles_result import RolesResult
from gatelens.model.graph import Graph
from gatelens.report._components import Edge


@dataclass(frozen=True, eq=False)
class CircuitRun:
    """A circuit and everything that was saved with it."""

    folder: Path
    asked: Mapping[str, Any]  # asked.json
    result: CircuitResult
    scores: list[Scores]  # of each task seed; empty if they were not saved
    prompts: list[ExamplePrompt]

    @property
    def has_graph(self) -> bool:
        """Whether this is a circuit of edges that can be drawn as a graph."""
        return self.result.settings.level == EDGES.name and self.result.graph is not None

    @property
    def edge_graph(self) -> Graph:
        """The graph of a run that has one."""
        assert self.result.graph is not None
        return self.result.graph

    @property
    def edge_scores(self) -> Tensor:
        """The scores of edges for the first task seed: (source, destination), or (role, source, destination)."""
        [edge_scores] = self.scores[0].gate_sets()
        return edge_scores.scores

    @property
    def role_scores(self) -> RoleEdgeScores | None:
        """The scores of edges by role for the first task seed; None if the run is of another level."""
        return self.scores[0] if self.scores and isinstance(self.scores[0], RoleEdgeScores) else None

    @property
    def head_scores(self) -> Tensor | None:
        """The mean over task seeds of `Scores.by_head`: (layer, head). None if the run has no score for each head."""
        maps = [head_map for scores in self.scores if (head_map := scores.by_head()) is not None]
        return torch.stack(maps).mean(0) if maps else None

    @property
    def can_be_drawn(self) -> bool:
        """Whether this is a circuit of edges, by role or not, that the page can draw as a graph."""
        return self.result.graph is not None and (self.has_graph or self.role_scores is not None)

    def ranked_gates(self) -> list[tuple[int, ...]]:
        """All gates of the ranking of the first task seed, best first, by their place in the scores."""
        settings, scores = self.result.settings, self.scores[0]
        [order] = selected(scores, settings.ranking, settings.selection)
        return [tuple(place) for place in torch.stack(torch.unravel_index(order, self.edge_scores.shape), 1).tolist()]

    def top_edges(self, most: int) -> list[Edge]:
        """The first edges of the ranking."""
        settings = self.result.settings
        [order] = selected(self.scores[0], settings.ranking, settings.selection)
        return [divmod(position, self.edge_graph.n_destinations) for position in order[:most].tolist()]


@dataclass(frozen=True, eq=False)
class RolesRun:
    """The roles of all heads, and the ablation curves."""

    folder: Path
    asked: Mapping[str, Any]  # asked.json
    result: RolesResult


@dataclass(frozen=True, eq=False)
class SparsifyRun:
    """What sparse post-training measured. The run may still be in progress."""

    folder: Path
    asked: Mapping[str, Any]  # settings.json
    log: list[dict[str, float]]  # every step
    judged: list[dict[str, float]]  # held-out text, at some steps

    @property
    def name(self) -> str:
        return "/".join(self.folder.resolve().parts[-2:])

    @property
    def target(self) -> float | None:
        """The target of the loss."""
        target: float | None = self.asked["settings"].get("target")
        return target


Run = CircuitRun | RolesRun | SparsifyRun
R = TypeVar("R", CircuitRun, RolesRun)


@dataclass(frozen=True)
class Runs:
    """All runs that could be read, in the order of their folders, and what is wrong with the others."""

    circuits: list[CircuitRun] = field(default_factory=list)
    roles: list[RolesRun] = field(default_factory=list)
    sparsified: list[SparsifyRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one sentence each

    @property
    def all(self) -> list[Run]:
        return [*self.circuits, *self.roles, *self.sparsified]


def labels(runs: Sequence[R]) -> dict[str, R]:
    """Runs by the name of their model. If two runs have the same model, the folder is added to the name."""
    names = [run.result.model for run in runs]
    repeated = {name for name in names if names.count(name) > 1}
    labelled: dict[str, R] = {}
    for name, run in zip(names, runs, strict=True):
        label, parts = name, run.folder.resolve().parts
        for depth in range(1, len(parts) + 1):  # as many folders as are needed to make the label unique
            if label in labelled or (depth == 1 and name in repeated):
                label = f"{name} ({'/'.join(parts[-depth:])})"
        labelled[label] = run
    return labelled

"""The level of edges by role: a gate on an edge between components acts at the positions of one role.

The gates are (row, role, source, destination). The roles are those that a task names (`gatelens.tasks.token_roles`), so
the level belongs to a task, and its runs to a batch: ``ROLE_EDGES.on(task, batch)``. Attribution of edges by position
is from Haklay et al., arXiv 2502.04577, who call the roles spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.component_runs import Components
from gatelens.gates.edges import ComponentEdges, ComponentEdgeScores
from gatelens.gates.gate_roles import GateRoles
from gatelens.gates.gradients import Metric
from gatelens.gates.level import Cost
from gatelens.gates.role_edge_runs import RoleEdgeAttribution, run_role_edges
from gatelens.gates.shared_level import ScoreTensors
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask

_USUAL_ROLES = 8  # for estimates before the task is known; the tasks of this package have 5 to 10


class RoleEdge(NamedTuple):
    """An edge by the numbers of its source and destination in the `Graph`, at the positions of a role.

    Example:
        best = gatelens.score_gates("edges-by-role", model, task, method="eap").top(1)[0].gate
        best.role, best.source, best.destination
    """

    role: str  # the name of the role
    source: int
    destination: int


@dataclass(frozen=True, eq=False, repr=False)
class RoleEdgeScores(ComponentEdgeScores):
    """How much each edge between components matters at each role, mean over prompts; 0 where there is no edge.

    The sum over roles is the score of the edge without roles, if the scores are by attribution.

    Example:
        role_scores = gatelens.score_gates("edges-by-role", model, task, method="eap")
        role_scores.scores.sum(0)  # the scores of the edges without roles
    """

    scores: Shaped[Tensor, "role source destination"]
    graph: Graph
    method: str
    roles: GateRoles  # the roles that gates belong to
    measured: Bool[Tensor, "role source destination"] | None = None
    magnitudes: Shaped[Tensor, "role source destination"] | None = None
    errors: Shaped[Tensor, "role source destination"] | None = None

    @property
    def level(self) -> RoleEdges:
        return RoleEdges(self.roles)

    def exists(self) -> Bool[Tensor, "role source destination"]:
        return _edges(self.graph, len(self.scores))

    def gate(self, number: int, position: int) -> tuple[RoleEdge, str]:
        role, source, destination = torch.unravel_index(torch.tensor(position), self.scores.shape)
        edge = RoleEdge(self.roles.names[int(role)], int(source), int(destination))
        return edge, f"{' -> '.join(self.ends(edge))} at {edge.role}"

    def effective(self, mask: Bool[Tensor, "role source destination"]) -> Bool[Tensor, "role source destination"]:
        """Only the edges that are on a path from the embedding to the logits."""
        return self.graph.on_a_path(mask[None], self.roles.sees)[0]

    def tensors(self) -> dict[str, Tensor]:
        names = torch.tensor(list("\n".join(self.roles.names).encode()), dtype=torch.uint8)
        return {**super().tensors(), "roles": names, "sees": self.roles.sees}


class RoleEdges(ComponentEdges[RoleEdgeScores]):
    """Gates on edges between components, by the role of positions.

    Arguments:
        roles: the roles that gates belong to; None: the level is not on a task yet, and has no gates (`on`).
    """

    name, noun = "edges-by-role", "edges by role"
    # `learned` is the cost of fitting optimal constants, which are those of edges without roles.
    cost = Cost(captures=2, patch=1.0, circuit=1.75, paths=2, learned=5.0)

    def __init__(self, roles: GateRoles | None = None) -> None:
        self._roles = roles

    @property
    def roles(self) -> GateRoles:
        """The roles that gates belong to."""
        if self._roles is None:
            raise GatelensError("the gates of edges by role depend on the task: use the level `level.on(task)`.")
        return self._roles

    def on(self, task: CircuitTask, batch: Bucket | None = None) -> RoleEdges:
        """The level with the roles of a task; a level that has roles already keeps them."""
        return RoleEdges((self._roles or GateRoles.named_by(task)).on(task, batch))

    def shape(self, model: Model, length: int) -> tuple[int, ...]:
        graph = Graph.of(model.anatomy)
        return len(self.roles.names), graph.n_sources, graph.n_destinations

    def n_gates(self, graph: Graph, length: int) -> int:
        n_roles = _USUAL_ROLES if self._roles is None else len(self._roles.names)
        return n_roles * (graph.n_edges - graph.n_sources) + graph.n_sources  # the logits have one role

    def positions(self, model: Model, *runs: Components) -> list[Int[Tensor, " _gate"]]:
        """All gates, ordered by destination, so that gates that are patched together share the layers below them."""
        edges = _edges(Graph.of(model.anatomy), len(self.roles.names))
        destinations, roles, sources = edges.permute(2, 0, 1).nonzero(as_tuple=True)
        return [(roles * edges.shape[1] + sources) * edges.shape[2] + destinations]

    def prune(
        self, model: Model, gates: Bool[Tensor, "row role source destination"]
    ) -> Bool[Tensor, "row role source destination"]:
        """Remove the gates that are not on a path from the embedding to the logits: they have no effect."""
        return Graph.of(model.anatomy).on_a_path(gates, self.roles.sees)

    def random_path(self, graph: Graph, generator: torch.Generator) -> list[int]:
        role, positions = len(self.roles.names) - 1, []
        for source, destination in graph.random_path(generator):  # from the logits down
            if graph.is_key_or_value(destination):
                visible = self.roles.sees[role].nonzero()[:, 0]
                role = int(visible[torch.randint(len(visible), (1,), generator=generator)])
            positions.append((role * graph.n_sources + source) * graph.n_destinations + destination)
        return positions

    def run(
        self,
        model: Model,
        tokens: Int[Tensor, "prompt position"],
        gates: Shaped[Tensor, "row role source destination"],
        closed: Components,
        *,
        start: Components | None = None,
        context: Context,
    ) -> Float[Tensor, "row prompt vocab"]:
        roles = self.roles.of_positions(tokens)
        return run_role_edges(model, tokens, gates, roles, closed, start=start, context=context)

    def attribution(self, model: Model, batch: Bucket, metric: Metric) -> RoleEdgeAttribution:
        return RoleEdgeAttribution(model, batch, metric, self.roles.of_positions(batch.clean), len(self.roles.names))

    def make_scores(self, graph: Graph, method: str, tensors: ScoreTensors) -> RoleEdgeScores:
        return RoleEdgeScores(tensors.scores, graph, method, self.roles, *tensors[1:])

    def read_scores(self, tensors: Mapping[str, Tensor], graph: Graph, method: str) -> RoleEdgeScores:
        names = bytes(tensors["roles"].tolist()).decode().split("\n")
        level = RoleEdges(GateRoles(tuple(names), tensors["sees"]))
        return super(RoleEdges, level).read_scores(tensors, graph, method)

    def attribute_numbers(self, model: Model, length: int) -> int:
        """Those of edges without roles, and three tensors of products with roles."""
        return super().attribute_numbers(model, length) + 3 * self.n_gates(Graph.of(model.anatomy), length)


def _edges(graph: Graph, n_roles: int) -> Bool[Tensor, "role source destination"]:
    """Where there is a gate: at every role of every edge, but only at the last role of edges into the logits."""
    edges = graph.edges.repeat(n_roles, 1, 1)
    edges[:-1, :, graph.logits] = False
    return edges


ROLE_EDGES = RoleEdges()

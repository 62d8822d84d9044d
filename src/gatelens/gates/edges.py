"""The level of edges between components: a gate lets a destination read a source's clean output, or its closed value.

The gates are (row, source, destination), numbered as in `Graph`. Gates where the graph has no edge are ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.gates.component_runs import Components, capture_components, with_sources
from gatelens.gates.edge_backward import learned_edge_numbers, run_learned_edges
from gatelens.gates.edge_gradients import EdgeAttribution
from gatelens.gates.edge_runs import edge_numbers, run_edges
from gatelens.gates.gradients import Metric
from gatelens.gates.level import Cost, Source, top_masks
from gatelens.gates.optimal import fit_edge_constants
from gatelens.gates.runs import gradient_numbers
from gatelens.gates.shared_level import S, ScoreTensors, SharedLevel, SharedScores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket


class ComponentEdge(NamedTuple):
    """An edge by the numbers of its source and destination in the `Graph`.

    Example:
        source, destination = edge_scores.top(1)[0].gate
    """

    source: int
    destination: int


_PATHS = 100  # random paths to try until one has an edge that is new


class ComponentEdgeScores(SharedScores):
    """Scores of gates on edges between components. The last two axes are source and destination."""

    graph: Graph

    def ends(self, gate: Any) -> tuple[str, ...]:
        return self.graph.source_names[gate.source], self.graph.destination_names[gate.destination]

    def head_weights(self) -> Float[Tensor, "layer head"]:
        """The sum of the absolute scores of the edges that leave each head."""
        weights = self.scores.abs() * self.exists()
        leaving = weights.sum([axis for axis in range(weights.ndim) if axis != weights.ndim - 2])
        return torch.stack([leaving[self.graph.heads(layer)] for layer in range(self.graph.n_layers)]).float()


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScores(ComponentEdgeScores):
    """How much each edge between components matters, mean over prompts; 0 where there is no edge.

    Example:
        edge_scores = gatelens.attribute_edges(model, task)
        edge_scores.scores[edge_scores.graph.edge("L0H2 -> logits")]
    """

    scores: Shaped[Tensor, "source destination"]
    graph: Graph
    method: str
    measured: Bool[Tensor, "source destination"] | None = None
    magnitudes: Shaped[Tensor, "source destination"] | None = None
    errors: Shaped[Tensor, "source destination"] | None = None

    @property
    def level(self) -> Edges:
        return EDGES

    def exists(self) -> Bool[Tensor, "source destination"]:
        return self.graph.edges

    def gate(self, number: int, position: int) -> tuple[ComponentEdge, str]:
        edge = ComponentEdge(*divmod(position, self.graph.n_destinations))
        return edge, " -> ".join(self.ends(edge))

    def effective(self, mask: Bool[Tensor, "source destination"]) -> Bool[Tensor, "source destination"]:
        """Only the edges that are on a path from the embedding to the logits."""
        return self.graph.on_a_path(mask[None])[0]


class ComponentEdges(SharedLevel[S]):
    """What all gates on edges between components have in common: what they read, and the memory of their runs."""

    sources = ("corrupt", "mean", "zero", "optimal")
    log_axis, head_map = True, ""

    def copies(self, model: Model) -> Int[Tensor, " _size"]:
        return Graph.of(model.anatomy).n_sharing.expand(self.shape(model, 0)).flatten()

    def count(self, model: Model, order: Int[Tensor, " gate"], k: int) -> int:
        return int(self.prune(model, self.masks(model, order, [k])).sum())

    def masks(
        self, model: Model, order: Int[Tensor, " gate"], ks: Sequence[int], complement: bool = False
    ) -> Bool[Tensor, "row ..."]:
        """The gates of each top-k circuit, including those that are not on a path from the embedding to the logits.

        Arguments:
            order: the positions of all gates from best to worst.
            ks: how many gates each circuit has.
            complement: all gates but the top k instead.
        """
        shape = torch.Size(self.shape(model, 0))
        return top_masks(order, ks, shape.numel(), complement).unflatten(1, shape)

    @abstractmethod
    def random_path(self, graph: Graph, generator: torch.Generator) -> list[int]:
        """The positions of the gates of a random path from the embedding to the logits."""

    def random_addition(
        self,
        model: Model,
        circuit: Int[Tensor, " _kept"],
        others: Int[Tensor, " _other"],
        generator: torch.Generator,
    ) -> Int[Tensor, " _added"]:
        """The new gates of a random path from the embedding to the logits."""
        graph = Graph.of(model.anatomy)
        for _ in range(_PATHS):
            path = torch.tensor(self.random_path(graph, generator))
            if len(added := path[~torch.isin(path, circuit)]):
                return added
        return super().random_addition(model, circuit, others, generator)  # the circuit has nearly all gates

    def capture(self, model: Model, tokens: Int[Tensor, "prompt position"]) -> Components:
        return capture_components(model, tokens)

    def closed(
        self, model: Model, tokens: Int[Tensor, "prompt position"], source: Source, mean: Callable[[], Any]
    ) -> Components:
        run = capture_components(model, tokens)
        if source == "corrupt":
            return run
        sources = torch.zeros_like(run.sources[:, :1, :1]) if source == "zero" else mean()
        return with_sources(model, run, sources)

    def mean(
        self, model: Model, batches: Iterable[Int[Tensor, "_prompt _position"]]
    ) -> Float[Tensor, "source 1 1 width"]:
        token_batches = list(batches)
        sums = [capture_components(model, tokens).sources.sum((1, 2)) for tokens in token_batches]
        n_tokens = sum(tokens.numel() for tokens in token_batches)
        return torch.stack(sums).sum(0)[:, None, None] / n_tokens

    def optimal(self, model: Model, batches: Sequence[Bucket], context: Context) -> Float[Tensor, "source 1 1 width"]:
        means = self.mean(model, [batch.corrupt for batch in batches])
        return fit_edge_constants(model, batches, means[:, 0, 0], context)[:, None, None].to(means)

    def constant_tensors(self, constants: Float[Tensor, "source 1 1 width"]) -> dict[str, Tensor]:
        return {"sources": constants[:, 0, 0]}

    def reads(self, run: Components) -> Components:
        return run

    def row_numbers(self, model: Model, length: int) -> int:
        return edge_numbers(model, length)

    def closed_numbers(self, model: Model, length: int) -> int:
        return length * model.anatomy.width * Graph.of(model.anatomy).n_sources

    def attribute_numbers(self, model: Model, length: int) -> int:
        return (
            gradient_numbers(model, length) + (Graph.of(model.anatomy).n_sources + 128) * model.anatomy.width * length
        )


class Edges(ComponentEdges[EdgeScores]):
    """Gates on edges between components."""

    name, noun = "edges", "edges"
    cost = Cost(captures=2, patch=1.0, circuit=1.75, paths=2, learned=5.0, softmax=1.6)

    def shape(self, model: Model, length: int) -> tuple[int, ...]:
        graph = Graph.of(model.anatomy)
        return graph.n_sources, graph.n_destinations

    def n_gates(self, graph: Graph, length: int) -> int:
        return graph.n_edges

    def positions(self, model: Model, *runs: Components) -> list[Int[Tensor, " _gate"]]:
        """All edges, ordered by destination, so that edges that are patched together share the layers below them."""
        graph = Graph.of(model.anatomy)
        destinations, sources = graph.edges.T.nonzero(as_tuple=True)
        return [sources * graph.n_destinations + destinations]

    def prune(
        self, model: Model, gates: Bool[Tensor, "row source destination"]
    ) -> Bool[Tensor, "row source destination"]:
        """Remove the edges that are not on a path from the embedding to the logits: they have no effect."""
        return Graph.of(model.anatomy).on_a_path(gates)

    def random_path(self, graph: Graph, generator: torch.Generator) -> list[int]:
        return [source * graph.n_destinations + destination for source, destination in graph.random_path(generator)]

    def run(
        self,
        model: Model,
        tokens: Int[Tensor, "prompt position"],
        gates: Shaped[Tensor, "row source destination"],
        closed: Components,
        *,
        start: Components | None = None,
        context: Context,
    ) -> Float[Tensor, "row prompt vocab"]:
        if gates.requires_grad and torch.is_grad_enabled():
            return run_learned_edges(model, tokens, gates, closed, context=context)
        return run_edges(model, tokens, gates, closed, start=start, context=context)

    def attribution(self, model: Model, batch: Bucket, metric: Metric) -> EdgeAttribution:
        return EdgeAttribution(model, batch, metric)

    def make_scores(self, graph: Graph, method: str, tensors: ScoreTensors) -> EdgeScores:
        return EdgeScores(tensors.scores, graph, method, *tensors[1:])

    def learned_numbers(self, model: Model, length: int) -> int:
        return learned_edge_numbers(model, length)


EDGES = Edges()

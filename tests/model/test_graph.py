"""The component graph: counts by hand, and paths as a plain graph search finds them."""

from __future__ import annotations

import re

import networkx
import pytest
import torch
from families import tiny
from torch import Tensor

from gatelens import GatelensError
from gatelens.model.graph import Graph

SHAPES = {
    "plain": Graph(3, 2, 2),
    "shared keys": Graph(3, 4, 2),
    "parallel": Graph(3, 2, 2, parallel=True),
    "coupled": Graph(3, 4, 2, coupled=True),
    "one head": Graph(2, 1, 1),
}


@pytest.fixture(params=SHAPES)
def graph(request: pytest.FixtureRequest) -> Graph:
    return SHAPES[request.param]


class TestCounts:
    def test_gpt2_small(self) -> None:
        assert Graph(12, 12, 12).n_edges == 32_491

    def test_smollm2_has_shared_keys(self) -> None:
        # Layer l has 1 + 10 l sources below it, read by 9 q, 3 k and 3 v inputs; its MLP also reads its 9 heads.
        below = [1 + 10 * layer for layer in range(30)]
        assert Graph(30, 9, 3).n_edges == sum(15 * n + (n + 9) for n in below) + 301

    def test_parallel_mlps_do_not_read_their_layers_heads(self) -> None:
        # Two layers of two heads: the embedding alone is read by 6 + 1 inputs, then 4 sources, then 7 by the logits.
        assert Graph(2, 2, 2, parallel=True).n_edges == 1 * 7 + 4 * 7 + 7
        assert Graph(2, 2, 2).n_edges == 1 * 6 + 3 + 4 * 6 + 6 + 7

    def test_edges_are_what_can_reach(self, graph: Graph) -> None:
        assert graph.n_edges == int(graph.edges.sum())
        assert graph.edges.shape == (len(graph.source_names), len(graph.destination_names))
        for source, name in enumerate(graph.source_names):
            for destination, other in enumerate(graph.destination_names):
                assert graph.edges[source, destination] == (_written(name, graph) < _read(other, graph))

    def test_of_a_model(self) -> None:
        graph = Graph.of(tiny("gpt_neox").anatomy)
        assert (graph.parallel, graph.coupled, graph.n_kv_heads) == (True, False, 4)
        assert Graph.of(tiny("gemma2").anatomy).coupled
        assert Graph.of(tiny("llama").anatomy).n_kv_heads == 2


def _layer(name: str) -> int:
    return int(name[1:]) if name[0] == "M" else int(re.match(r"L(\d+)", name)[1])


def _written(source: str, graph: Graph) -> float:
    """When a source has written, in layers: heads in the middle of their layer, MLPs at its end."""
    if source == "embed":
        return 0
    return _layer(source) + (0.5 if source[0] == "L" and not graph.parallel else 1)


def _read(destination: str, graph: Graph) -> float:
    """When a destination reads, a little after what is written at the same time."""
    if destination == "logits":
        return graph.n_layers + 0.1
    return _layer(destination) + (0.6 if destination[0] == "M" and not graph.parallel else 0.1)


class TestOnAPath:
    """Edges of a circuit that lie on a path from the embedding to the logits."""

    @pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
    def test_is_what_a_graph_search_finds(self, graph: Graph, share: float) -> None:
        circuits = torch.rand(20, *graph.edges.shape, generator=torch.Generator().manual_seed(0)) < share
        on_a_path = graph.on_a_path(circuits)
        assert on_a_path.any()
        assert not on_a_path.all()
        for circuit, edges in zip(circuits, on_a_path, strict=True):
            assert torch.equal(edges, _searched(graph, circuit))

    def test_everything_is_on_a_path(self, graph: Graph) -> None:
        assert torch.equal(graph.on_a_path(graph.edges[None])[0], graph.edges)

    def test_nothing_is_on_no_path(self, graph: Graph) -> None:
        assert not graph.on_a_path(torch.zeros(1, *graph.edges.shape, dtype=torch.bool)).any()

    def test_a_single_edge_counts_only_if_it_is_a_path(self) -> None:
        graph = SHAPES["plain"]
        for name, counts in (("embed -> logits", True), ("embed -> L1H0.q", False), ("L1H0 -> logits", False)):
            circuits = torch.zeros(1, *graph.edges.shape, dtype=torch.bool)
            circuits[(0, *graph.edge(name))] = True
            assert bool(graph.on_a_path(circuits).any()) is counts


def _searched(graph: Graph, circuit: Tensor) -> Tensor:
    """The same, with a node for each component: an input leads to every output that depends on it."""
    group = graph.n_heads // graph.n_kv_heads
    search = networkx.DiGraph()
    search.add_nodes_from(["out embed", "in logits"])
    for source, name in enumerate(graph.source_names):
        for destination, other in enumerate(graph.destination_names):
            if circuit[source, destination] and graph.edges[source, destination]:
                search.add_edge(f"out {name}", f"in {other}")
    for layer in range(graph.n_layers):
        search.add_edge(f"in M{layer}", f"out M{layer}")
        for head in range(graph.n_heads):
            shared = f"L{layer}H{head}" if group == 1 else f"L{layer}KV{head // group}"
            inputs = [f"in L{layer}H{head}.q", f"in {shared}.k", f"in {shared}.v"]
            outputs = range(graph.n_heads) if graph.coupled else [head]
            search.add_edges_from((i, f"out L{layer}H{other}") for i in inputs for other in outputs)
    reached = networkx.descendants(search, "out embed") | {"out embed"}
    useful = networkx.ancestors(search, "in logits") | {"in logits"}
    on_a_path = torch.zeros_like(circuit)
    for source, name in enumerate(graph.source_names):
        for destination, other in enumerate(graph.destination_names):
            edge = f"out {name}", f"in {other}"
            on_a_path[source, destination] = search.has_edge(*edge) and edge[0] in reached and edge[1] in useful
    return on_a_path


class TestNames:
    def test_an_edge_by_name(self, graph: Graph) -> None:
        for source, destination in graph.edges.nonzero().tolist()[::7]:
            name = f"{graph.source_names[source]} -> {graph.destination_names[destination]}"
            assert graph.edge(name) == (source, destination)

    def test_shared_inputs_are_named_after_the_kv_head(self) -> None:
        assert "L0KV1.k" in SHAPES["shared keys"].destination_names
        assert "L0H1.k" in SHAPES["plain"].destination_names

    @pytest.mark.parametrize("name", ["", "embed", "embed -> embed", "L1H0 -> L0H0.q", "L9H0 -> logits", "a -> b -> c"])
    def test_names_that_are_not_an_edge(self, name: str) -> None:
        with pytest.raises(GatelensError, match="no edge"):
            SHAPES["plain"].edge(name)

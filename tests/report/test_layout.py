"""The places of a circuit's components: by layer, apart from each other, the same every time, with few crossings."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
import torch

from gatelens.model.graph import Graph
from gatelens.report._components import Edge, component_name, connected_components, links
from gatelens.report._layout import layout

PLAIN, SHARED = Graph(4, 4, 4), Graph(6, 6, 2)


def some_edges(graph: Graph, n: int, seed: int = 0) -> list[Edge]:
    every = graph.edges.nonzero()
    chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:n]
    return [(int(source), int(destination)) for source, destination in every[chosen].tolist()]


def joined(graph: Graph, kept: list[Edge]) -> list[tuple[str, str]]:
    return sorted({(graph.source_names[s], component_name(graph.destination_names[d])) for s, d in kept})


def crossings(places: dict[str, tuple[float, float]], ends: list[tuple[str, str]]) -> int:
    """How many pairs of straight edges without a common end cross: the ends of each lie on two sides of the other."""

    def side(a: str, b: str, c: str) -> float:
        (ax, ay), (bx, by), (cx, cy) = places[a], places[b], places[c]
        return (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)

    return sum(
        side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0
        for (a, b), (c, d) in combinations(ends, 2)
        if len({a, b, c, d}) == 4
    )


@pytest.mark.parametrize(
    "graph", [PLAIN, SHARED, Graph(12, 12, 12, parallel=True)], ids=["plain", "shared", "parallel"]
)
@pytest.mark.parametrize("n", [1, 30, 200])
def test_every_edge_points_upwards_and_no_two_components_meet(graph: Graph, n: int) -> None:
    kept = some_edges(graph, n)
    places = layout(graph, kept)
    assert set(places) == {name for ends in joined(graph, kept) for name in ends}
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in places.values())
    assert all(places[low][1] < places[high][1] for low, high in [*joined(graph, kept), *links(graph, list(places))])
    layers: dict[int, list[tuple[float, float]]] = {}
    for name, place in places.items():
        if number := re.match(r"[LM](\d+)", name):
            layers.setdefault(int(number[1]), []).append(place)
    # In a layer each component has an x of its own, so that names beside each other can be read.
    for members in layers.values():
        assert len({x for x, _ in members}) == len(members)
    # A higher layer stands wholly above a lower one.
    heights = [[y for _, y in members] for _, members in sorted(layers.items())]
    assert all(max(low) < min(high) for low, high in pairwise(heights))


def test_embedding_and_logits_are_the_ends() -> None:
    places = layout(PLAIN, [PLAIN.edge("embed -> L2H1.q"), PLAIN.edge("L2H1 -> logits")])
    assert [places[name][1] for name in ("embed", "L2H1", "logits")] == [0, 0.5, 1]
    assert layout(PLAIN, []) == {}


def test_components_come_in_the_order_of_the_model() -> None:
    kept = [SHARED.edge(name) for name in ("M0 -> logits", "embed -> L1KV1.k", "L0H5 -> L1H3.q", "L0H1 -> M0")]
    assert connected_components(SHARED, kept) == ["embed", "L0H1", "L0H5", "M0", "L1KV1", "L1H3", "logits"]
    # KV head 1 serves heads 3 to 5.
    assert links(SHARED, connected_components(SHARED, kept)) == [("L1KV1", "L1H3")]


def test_the_same_circuit_stands_the_same() -> None:
    kept = some_edges(SHARED, 60)
    assert layout(SHARED, kept) == layout(SHARED, kept[::-1])


def test_chains_that_cross_by_number_are_untangled() -> None:
    # Head i of a layer feeds head 3 - i of the next: in the order of numbers all pairs cross, twice over.
    names = [f"L{layer}H{head} -> L{layer + 1}H{3 - head}.v" for layer in (0, 1) for head in range(4)]
    kept = [PLAIN.edge(name) for name in names]
    by_number = {f"L{layer}H{head}": (head / 4, layer / 2) for layer in range(3) for head in range(4)}
    assert crossings(by_number, joined(PLAIN, kept)) == 12
    assert crossings(layout(PLAIN, kept), joined(PLAIN, kept)) == 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_there_are_far_fewer_crossings_than_in_the_order_of_numbers(seed: int) -> None:
    graph = Graph(12, 12, 12)
    kept = some_edges(graph, 100, seed)
    places = layout(graph, kept)
    by_layer: dict[float, int] = {}
    by_number = {}
    for name, (_, y) in places.items():  # in the order of the model
        by_layer[y] = by_layer.get(y, -1) + 1
        by_number[name] = (by_layer[y] / 12, y)
    ends = joined(graph, kept)
    assert crossings(places, ends) < 0.6 * crossings(by_number, ends)

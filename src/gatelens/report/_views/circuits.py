"""Circuit graphs of the page: circuits of every size, whose edges are on paths from the embedding to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gatelens.model.graph import Graph
from gatelens.report._components import Edge, component_name, connected_components, links
from gatelens.report._numbers import short
from gatelens.report._runs import CircuitRun
from gatelens.report._summary import Group
from gatelens.report._views.attention import strongest_pairs
from gatelens.report._views.joins import joins

MOST_EDGES = 400


def circuit_views(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One view for each task and method with edge circuits. Its sides are models that can be compared side by side."""
    views = []
    for group in groups:
        runs = {entry.label: entry.run for entry in group.entries if entry.run.has_graph}
        if runs:
            sides = [_side(label, run, group.threshold) for label, run in runs.items()]
            views.append({"task": group.task, "method": group.method, "sides": sides})
    return views


def growth(graph: Graph, ranked: Sequence[Edge], most: int = MOST_EDGES) -> tuple[list[Edge], list[list[int]]]:
    """The edges of growing circuits, without those that are on no path from the embedding to the logits.

    The circuit of the first k edges of a ranking consists of those among them that are on a path. As k grows, it grows
    by one edge or, when an edge closes a path, by several.

    Arguments:
        ranked: all edges of a ranking, best first.
        most: stop before this many edges, but not before the first path.

    Returns:
        The edges in the order in which they join the circuit, and the circuits, [size, k] each: the circuit of the
        first k edges of the ranking consists of the first ``size`` edges of this order.
    """
    joined = torch.tensor(joins(graph, ranked))
    places = joined.nonzero()[:, 0]
    places = places[joined[places].argsort(stable=True)]
    asked, sizes = joined[places].unique_consecutive(return_counts=True)
    circuits = [[size, k] for size, k in zip(sizes.cumsum(0).tolist(), asked.tolist(), strict=True)]
    shown = [circuit for circuit in circuits if circuit[0] <= most] or circuits[:1]
    largest = shown[-1][0] if shown else 0
    return [ranked[place] for place in places[:largest].tolist()], shown


def _side(label: str, run: CircuitRun, threshold: float) -> dict[str, Any]:
    graph, curve = run.edge_graph, run.result.curve
    edges, circuits = growth(graph, run.top_edges(graph.n_edges))
    names = connected_components(graph, edges)
    number = {name: i for i, name in enumerate(names)}
    ends = [graph.destination_names[j] for _, j in edges]
    return {
        "label": label,
        "sparse": run.result.sparse,
        "total": graph.n_edges,
        "threshold": threshold,
        "count": curve.count_at(threshold),
        "needed": str(curve.counted(threshold)),
        "kept": short(curve.kept),
        "effect": short(curve.effect),
        "circuits": circuits,
        "names": names,
        "scores": [_component_score(run, name) for name in names],
        "attends": [strongest_pairs(run.prompts, name) for name in names],
        "links": [[number[a], number[b]] for a, b in links(graph, names)],
        "source": [number[graph.source_names[i]] for i, _ in edges],
        "destination": [number[component_name(end)] for end in ends],
        "input": [end.partition(".")[2] for end in ends],
        "score": short(torch.stack([run.edge_scores[edge] for edge in edges])) if edges else [],
    }


def _component_score(run: CircuitRun, name: str) -> float | None:
    """The sum of the scores of all edges that leave a component: to first order, the effect of its output."""
    names = run.edge_graph.source_names
    return short(run.edge_scores[names.index(name)].sum()[None])[0] if name in names else None

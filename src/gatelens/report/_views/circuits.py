"""Circuit graphs of the page: the top edges of each model, and where its components stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gatelens.model.components import Component
from gatelens.model.graph import Graph
from gatelens.report._components import Edge, component_name, connected_components, links
from gatelens.report._layout import layout
from gatelens.report._numbers import short
from gatelens.report._runs import CircuitRun
from gatelens.report._summary import Group
from gatelens.report._views.attention import strongest_pairs
from gatelens.report._views.joins import joins

MOST_EDGES = 1000
_LAID_OUT = (40, 100)  # numbers of edges up to which a graph gets a layout of its own

Places = dict[str, tuple[float, float]]  # name -> (x, y), both in 0..1


def circuit_views(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One view for each task and method with edge circuits. Its sides are models that can be compared side by side."""
    views = []
    for group in groups:
        runs = {entry.label: entry.run for entry in group.entries if entry.run.has_graph}
        if runs:
            views.append({"title": f"{group.task}, {group.method}", "sides": _sides(runs, group.threshold)})
    return views


def _sides(runs: dict[str, CircuitRun], threshold: float) -> list[dict[str, Any]]:
    tops = {label: run.top_edges(MOST_EDGES) for label, run in runs.items()}
    # Models of one shape share their places, so that a component stands at the same place on both sides.
    tops_by_shape: dict[Graph, list[list[Edge]]] = {}
    for label, run in runs.items():
        tops_by_shape.setdefault(run.edge_graph, []).append(tops[label])
    places = {graph: _places(graph, shape_tops) for graph, shape_tops in tops_by_shape.items()}
    return [_side(label, run, tops[label], places[run.edge_graph], threshold) for label, run in runs.items()]


def _places(graph: Graph, tops: Sequence[Sequence[Edge]]) -> dict[int, Places]:
    """Where components stand while up to so many edges are drawn.

    A few edges get a layout with few crossings. Of many edges only the overall shape can be seen, and it is clearest if
    heads stand in their order.
    """
    places = {most: layout(graph, sorted({edge for top in tops for edge in top[:most]})) for most in _LAID_OUT}
    every = connected_components(graph, {edge for top in tops for edge in top})
    return {**places, MOST_EDGES: in_order(graph, every)}


def in_order(graph: Graph, names: Sequence[str]) -> Places:
    """Places by layer (y) and by number inside the layer (x), with the MLPs at the right."""
    group_size, columns, bands = graph.n_heads / graph.n_kv_heads, graph.n_heads + 1, graph.n_layers + 1

    def place(name: str) -> tuple[float, float]:
        component = Component.find(name)
        if component is None:
            return 0.5, float(name == "logits")
        if component.kind == "M":
            return 1 - 0.5 / columns, (component.layer + 1.3) / bands
        if component.kind == "KV":
            return (component.index + 0.5) * group_size / columns, (component.layer + 0.7) / bands
        return (component.index + 0.5) / columns, (component.layer + 1) / bands

    return {name: place(name) for name in names}


def _side(label: str, run: CircuitRun, top: list[Edge], places: dict[int, Places], threshold: float) -> dict[str, Any]:
    graph, curve = run.edge_graph, run.result.curve
    names = connected_components(graph, top)
    number = {name: i for i, name in enumerate(names)}
    sources, destinations = zip(*top, strict=True)
    ends = [graph.destination_names[j] for j in destinations]
    return {
        "label": label,
        "sparse": run.result.sparse,
        "total": graph.n_edges,
        "threshold": threshold,
        "count": curve.count_at(threshold),
        "needed": str(curve.counted(threshold)),
        "curve": {"asked": curve.asked, "kept": short(curve.kept), "effect": short(curve.effect)},
        "names": names,
        "places": [
            {"most": most, "x": _coordinates(names, stage, 0), "y": _coordinates(names, stage, 1)}
            for most, stage in places.items()
        ],
        "scores": [_component_score(run, name) for name in names],
        "attends": [strongest_pairs(run.prompts, name) for name in names],
        "links": [[number[a], number[b]] for a, b in links(graph, names)],
        "source": [number[graph.source_names[i]] for i in sources],
        "destination": [number[component_name(end)] for end in ends],
        "input": [end.partition(".")[2] for end in ends],
        "score": short(run.edge_scores[list(sources), list(destinations)]),
        "joins": joins(graph, top),
    }


def _coordinates(names: Sequence[str], places: Places, axis: int) -> list[float | None]:
    return [round(places[name][axis], 4) if name in places else None for name in names]


def _component_score(run: CircuitRun, name: str) -> float | None:
    """The sum of the scores of all edges that leave a component: to first order, the effect of its output."""
    names = run.edge_graph.source_names
    return short(run.edge_scores[names.index(name)].sum()[None])[0] if name in names else None

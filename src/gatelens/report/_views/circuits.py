"""Circuit graphs of the page: circuits of every size, whose edges are on paths from the embedding to the logits.

A node of a graph is a component. In a circuit of edges by role it is a component at the positions of one role, such as
``L3H7 at S2``, and the page draws a column for each role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatelens.gates import LEVELS
from gatelens.model.graph import Graph
from gatelens.report._components import attention_moves, component_name, connected_components, links
from gatelens.report._numbers import short
from gatelens.report._runs import CircuitRun
from gatelens.report._summary import Group
from gatelens.report._views.attention import strongest_pairs
from gatelens.report._views.joins import RankedEdge, joins

MOST_EDGES = 400


def circuit_views(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One view for each task and method with edge circuits. Its sides are models that can be compared side by side."""
    views = []
    for group in groups:
        runs = {entry.label: entry.run for entry in group.entries if entry.run.can_be_drawn}
        if runs:
            sides = [_side(label, run, group.threshold) for label, run in runs.items()]
            views.append({"task": group.task, "gates": group.gates, "noun": LEVELS[group.level].noun, "sides": sides})
    return views


def growth(
    graph: Graph, ranked: Sequence[RankedEdge], most: int = MOST_EDGES, *, sees: Tensor | None = None
) -> tuple[list[RankedEdge], list[list[int]]]:
    """The edges of growing circuits, without those that are on no path from the embedding to the logits.

    The circuit of the first k edges of a ranking consists of those among them that are on a path. As k grows, it grows
    by one edge or, when an edge closes a path, by several.

    Arguments:
        ranked: all edges of a ranking, best first.
        most: stop before this many edges, but not before the first path.
        sees: which roles each role sees; only if edges have roles (`joins`).

    Returns:
        The edges in the order in which they join the circuit, and the circuits, [size, k] each: the circuit of the
        first k edges of the ranking consists of the first ``size`` edges of this order.
    """
    joined = torch.tensor(joins(graph, ranked, sees))
    places = joined.nonzero()[:, 0]
    places = places[joined[places].argsort(stable=True)]
    asked, sizes = joined[places].unique_consecutive(return_counts=True)
    circuits = [[size, k] for size, k in zip(sizes.cumsum(0).tolist(), asked.tolist(), strict=True)]
    shown = [circuit for circuit in circuits if circuit[0] <= most] or circuits[:1]
    largest = shown[-1][0] if shown else 0
    return [ranked[place] for place in places[:largest].tolist()], shown


def _side(label: str, run: CircuitRun, threshold: float) -> dict[str, Any]:
    graph, curve, role_scores = run.edge_graph, run.result.curve, run.role_scores
    roles = () if role_scores is None else role_scores.roles.names
    sees = None if role_scores is None else role_scores.roles.sees
    edges, circuits = growth(graph, run.ranked_gates(), sees=sees)
    ends = [(graph.source_names[edge[-2]], graph.destination_names[edge[-1]]) for edge in edges]
    # A node is (role, component); without roles, the role is 0.
    role_of = [edge[0] if roles else 0 for edge in edges]
    starts = [(role, source) for role, (source, _) in zip(role_of, ends, strict=True)]
    stops = [(role, component_name(end)) for role, (_, end) in zip(role_of, ends, strict=True)]
    order = {name: i for i, name in enumerate(connected_components(graph, [(e[-2], e[-1]) for e in edges]))}
    nodes = sorted({*starts, *stops}, key=lambda node: (order[node[1]], node[0]))
    number = {node: i for i, node in enumerate(nodes)}
    if sees is None:
        linked = [((0, a), (0, b)) for a, b in links(graph, list(order))]
    else:
        linked = attention_moves(graph, sees, set(nodes), set(starts))
    return {
        "label": label,
        "sparse": run.result.sparse,
        "total": curve.total,
        "threshold": threshold,
        "count": curve.count_at(threshold),
        "needed": str(curve.counted(threshold)),
        "kept": short(curve.kept),
        "effect": short(curve.effect),
        "circuits": circuits,
        "roles": list(roles),
        "names": [f"{name} at {roles[role]}" if roles else name for role, name in nodes],
        "scores": [_component_score(run, name) for _, name in nodes],
        "attends": [strongest_pairs(run.prompts, name) for _, name in nodes],
        "links": [[number[a], number[b]] for a, b in linked],
        "source": [number[node] for node in starts],
        "destination": [number[node] for node in stops],
        "input": [end.partition(".")[2] for _, end in ends],
        "score": short(torch.stack([run.edge_scores[edge] for edge in edges])) if edges else [],
    }


def _component_score(run: CircuitRun, name: str) -> float | None:
    """The sum of the scores of all edges that leave a component: to first order, the effect of its output."""
    names = run.edge_graph.source_names
    return short(run.edge_scores[..., names.index(name), :].sum()[None])[0] if name in names else None

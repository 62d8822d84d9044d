"""A circuit of edges by role as a drawing: a column for each role, and the components of each role by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.components import Component
from gatelens.model.graph import Graph
from gatelens.report._components import STAGGER, RoleNode, attention_moves, component_name
from gatelens.report.figures._circuit_graph import (
    BOX_WIDTH,
    EdgeLine,
    Point,
    draw_bands,
    draw_box,
    draw_edges,
    draw_legend,
)
from gatelens.report.figures._style import NotebookFigure, note, styled
from gatelens.report.figures._text import shown, wrapped

_LAYER, _GAP = 0.62, 0.14  # height of a layer, and the space between boxes, in inches


@styled
def role_circuit_figure(
    graph: Graph, roles: Sequence[str], sees: Tensor, scores: Tensor, circuit: Tensor, title: str = ""
) -> Figure:
    """The edges of a circuit of edges by role, and the components that they connect at each role.

    An edge stays in the column of its role. A grey line leads from the keys and values of a head (or of the KV head
    that heads share) at one role to the output of the head at another role, which attention can move them to. Widths,
    colours and lines are those of `circuit_figure`.

    Arguments:
        roles: the names of the roles, from left to right.
        sees: bool (role, other role), whether positions of the other role are visible to the role.
        scores: the score of each edge at each role, (role, source, destination).
        circuit: the edges to draw: bool, with the same shape.
    """
    gates = [tuple(gate) for gate in (circuit.cpu() & graph.edges).nonzero().tolist()]
    if not gates:
        raise GatelensError("the circuit has no edge, so there is nothing to draw: keep at least 1 edge.")
    ends = {
        (role, source, destination): (
            (role, graph.source_names[source]),
            (role, component_name(graph.destination_names[destination])),
        )
        for role, source, destination in gates
    }
    nodes = {node for pair in ends.values() for node in pair}
    # 1. Where boxes stand, in inches.
    bands = _bands(nodes)
    inches, columns = _places(nodes, bands)
    width, height = columns[max(columns)][1] + 0.1, _height("logits", bands)
    figure = NotebookFigure(figsize=(max(5.0, width + 0.2), height + 1.5), layout="constrained")
    above = note(figure, _remark(graph, roles, sees, scores, circuit, len(gates)))
    axis = above.subplots()
    axis.set(xlim=(0, width), ylim=(-0.75, height + 0.2))
    axis.set_axis_off()
    # 2. From back to front: bands, columns, links, edges, boxes.
    draw_bands(axis, {str(layer): y for layer, y in bands.items()}, _LAYER)
    _columns(axis, {shown(roles[role]): place for role, place in columns.items()})
    for start, end in attention_moves(graph, sees, nodes, {pair[0] for pair in ends.values()}):
        axis.plot(*zip(inches[start], inches[end], strict=True), color="0.6", linewidth=0.6, zorder=1.5)
    draw_edges(axis, _lines(graph, scores, ends, inches))
    for (role, name), place in inches.items():
        draw_box(axis, name, place, f" at {roles[role]}")
    draw_legend(above, "attention to another role")
    axis.set_title(shown(title))
    return figure


def _places(
    nodes: Iterable[RoleNode], bands: dict[int, float]
) -> tuple[dict[RoleNode, Point], dict[int, tuple[float, float]]]:
    """Where each box stands, and the left and right end of each role's column."""
    rows: dict[tuple[int, float], list[str]] = defaultdict(list)  # (role, height) -> boxes beside each other
    for role, name in nodes:
        rows[role, _height(name, bands)].append(name)
    columns: dict[int, tuple[float, float]] = {}
    left = 0.35
    for role in sorted({role for role, _ in rows}):
        widest = max(len(names) for (own, _), names in rows.items() if own == role)
        columns[role] = (left, left + widest * (BOX_WIDTH + _GAP) + 2 * _GAP)
        left = columns[role][1]
    inches: dict[RoleNode, Point] = {}
    for (role, y), names in rows.items():
        first = sum(columns[role]) / 2 - (len(names) - 1) / 2 * (BOX_WIDTH + _GAP)
        for i, name in enumerate(sorted(names, key=_index)):
            inches[role, name] = first + i * (BOX_WIDTH + _GAP), y
    return inches, columns


def _bands(nodes: Iterable[RoleNode]) -> dict[int, float]:
    """The height of the middle of each layer that is drawn."""
    layers = {component.layer for _, name in nodes if (component := Component.find(name)) is not None}
    return {layer: (i + 1) * _LAYER for i, layer in enumerate(sorted(layers))}


def _height(name: str, bands: dict[int, float]) -> float:
    component = Component.find(name)
    if component is None:
        return 0.0 if name == "embed" else (len(bands) + 1) * _LAYER
    return bands[component.layer] + STAGGER[component.kind] * _LAYER


def _index(name: str) -> int:
    component = Component.find(name)
    return 0 if component is None else component.index


def _columns(axis: Axes, columns: dict[str, tuple[float, float]]) -> None:
    for name, (left, right) in columns.items():
        axis.axvline(left, color="0.85", linewidth=0.6, zorder=0.5)
        axis.text(
            (left + right) / 2, -0.3, wrapped(name, right - left, 7), fontsize=7, color="0.25", ha="center", va="top"
        )


def _lines(
    graph: Graph,
    scores: Tensor,
    ends: Mapping[tuple[int, int, int], tuple[RoleNode, RoleNode]],
    inches: dict[RoleNode, Point],
) -> list[EdgeLine]:
    lines = []
    for gate, (start, end) in ends.items():
        port = graph.destination_names[gate[2]].partition(".")[2]
        lines.append(EdgeLine(float(scores[gate]), port, inches[start], inches[end]))
    return lines


def _remark(graph: Graph, roles: Sequence[str], sees: Tensor, scores: Tensor, circuit: Tensor, n_drawn: int) -> str:
    on_a_path = int(graph.on_a_path(circuit[None].cpu(), sees.cpu()).sum())
    strongest = float(scores.abs()[circuit].max())
    total = len(roles) * (graph.n_edges - graph.n_sources) + graph.n_sources
    return (
        f"{n_drawn:,} of {total:,} edges by role, {on_a_path:,} of them on a path from the embedding to the logits. "
        f"Width: absolute score, up to {strongest:.2g}. Columns: roles of tokens. Numbers at the left: layers."
    )

"""A circuit as a drawing: its components by layer from bottom to top, and its edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.path import Path
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.scores import GateSet, Ranking, rank
from gatelens.model.components import Component
from gatelens.model.graph import Graph
from gatelens.report._components import Edge, links
from gatelens.report._layout import layout
from gatelens.report.figures._style import BLUE, RED, NotebookFigure, note, styled
from gatelens.report.figures._text import shown

LINES: dict[str, object] = {"q": "-", "k": (0, (4, 1.5)), "v": (0, (1, 1.2)), "": "-"}
FILLS = {"H": "#FFFFFF", "KV": "#E8E8E8", "M": "#FFF3D6"}
BOX_WIDTH, _BOX_HEIGHT = 0.44, 0.17  # in inches
Point = tuple[float, float]  # in inches
_PORTS = {"q": -0.3, "k": 0.0, "v": 0.3, "": 0.0}  # where an edge enters a box, in box widths from its middle


class EdgeLine(NamedTuple):
    """An edge that is drawn between two boxes: its score, the input that it enters, and the middles of the boxes."""

    score: float
    port: str
    start: Point
    end: Point


@styled
def circuit_figure(
    graph: Graph, scores: Tensor, circuit: Tensor | int, title: str = "", ranking: Ranking | None = None
) -> Figure:
    """The edges of a circuit and the components that they connect.

    The width of an edge shows its absolute score. Blue edges help the task (score above 0), red edges hinder it. An
    edge enters a head at its q (left, solid), k (middle, dashed) or v (right, dotted) input. If heads share keys and
    values, k and v edges enter the box of the KV head, and a grey line connects it to its heads that are drawn.

    Arguments:
        scores: the score of each edge, (source, destination).
        circuit: the edges to draw as a mask, bool (source, destination), or the number of top edges by the ranking.
        ranking: how edges are ordered if ``circuit`` is a number (by default by absolute score), and how those of a
            mask were chosen, for the note below the figure.
    """
    if isinstance(circuit, int):
        ranking = ranking or "absolute"
    edges = chosen_edges(graph, scores, circuit, ranking or "absolute")
    places = layout(graph, edges)
    # 1. One unit is one inch, so that boxes and letters have the same size in every figure.
    columns = _columns([x for x, _ in places.values()])
    layers = _layers(places)
    band = min(max(9 / (len(layers) + 1), 0.6), 1.1)
    width, height = max(4.6, 0.5 + columns * (BOX_WIDTH + 0.12)), band * (len(layers) + 1)
    low, high = (limit(y for _, y in places.values()) * height for limit in (min, max))
    figure = NotebookFigure(figsize=(width + 0.2, high - low + 1.25), layout="constrained")
    above = note(figure, _remark(graph, scores, edges, ranking))
    axis = above.subplots()
    axis.set(xlim=(0, width), ylim=(low - 0.2, high + 0.2))
    axis.set_axis_off()
    inches = {name: (0.45 + x * (width - 0.5), y * height) for name, (x, y) in places.items()}
    # 2. From back to front: bands, links, weak edges, strong edges, boxes.
    draw_bands(axis, {layer: y * height for layer, y in layers.items()}, band)
    for ends in links(graph, list(places)):
        axis.plot(*zip(*(inches[name] for name in ends), strict=True), color="0.6", linewidth=0.6, zorder=1.5)
    draw_edges(axis, _lines(graph, scores, edges, inches))
    for name, place in inches.items():
        draw_box(axis, name, place)
    shared = "KV head of a head" if graph.n_kv_heads != graph.n_heads else ""
    draw_legend(above, shared)
    axis.set_title(shown(title))
    return figure


def chosen_edges(graph: Graph, scores: Tensor, circuit: Tensor | int, ranking: Ranking = "absolute") -> list[Edge]:
    """The edges of a circuit, given as a mask or as a number of top edges, in the order of their sources."""
    if tuple(scores.shape) != (graph.n_sources, graph.n_destinations):
        raise GatelensError(
            f"the scores have the shape {tuple(scores.shape)}, and the edges of this model have the shape "
            f"({graph.n_sources}, {graph.n_destinations}), by source and destination: give scores of the same model."
        )
    if isinstance(circuit, int):
        every = graph.edges.nonzero()
        priorities = GateSet(scores.cpu(), graph.edges).priorities(ranking)[graph.edges]
        top = every[rank(priorities)[: max(circuit, 0)]]
        mask = torch.zeros_like(graph.edges)
        mask[top[:, 0], top[:, 1]] = True
    else:
        mask = circuit.cpu().bool() & graph.edges
    edges = [(int(source), int(destination)) for source, destination in mask.nonzero().tolist()]
    if not edges:
        raise GatelensError(f"the circuit has no edge, so there is nothing to draw: give 1 to {graph.n_edges:,} edges.")
    return edges


def _columns(xs: Sequence[float]) -> int:
    """How many boxes must fit beside each other so that the two nearest ones do not touch."""
    distinct = sorted({round(x, 6) for x in xs})
    gaps = [b - a for a, b in pairwise(distinct)]
    return round(1 / min(gaps)) if gaps else 1


def _layers(names: Iterable[str]) -> dict[str, float]:
    """The height of the middle of each layer that is drawn, in 0..1, from the lowest layer on."""
    layers = sorted({component.layer for name in names if (component := Component.find(name)) is not None})
    return {str(layer): (i + 1) / (len(layers) + 1) for i, layer in enumerate(layers)}


def draw_bands(axis: Axes, layers: dict[str, float], band: float) -> None:
    for i, (layer, y) in enumerate(layers.items()):
        if i % 2 == 0:
            axis.axhspan(y - band / 2, y + band / 2, color="0.97", linewidth=0, zorder=0)
        axis.text(0.04, y, layer, fontsize=6.5, color="0.45", va="center", ha="left")


def _lines(graph: Graph, scores: Tensor, edges: Sequence[Edge], inches: dict[str, Point]) -> list[EdgeLine]:
    """Each edge as a line between the boxes of its components."""
    lines = []
    for source, destination in edges:
        component, _, port = graph.destination_names[destination].partition(".")
        score = float(scores[source, destination])
        lines.append(EdgeLine(score, port, inches[graph.source_names[source]], inches[component]))
    return lines


def draw_edges(axis: Axes, lines: Iterable[EdgeLine]) -> None:
    """Draw edges from the top of one box to the bottom of another, the strongest in front."""
    ordered = sorted(lines, key=lambda line: abs(line.score))
    strongest = abs(ordered[-1].score) or 1.0
    starts = [(x, y + _BOX_HEIGHT / 2) for x, y in (line.start for line in ordered)]
    ends = [(line.end[0] + _PORTS[line.port] * BOX_WIDTH, line.end[1] - _BOX_HEIGHT / 2) for line in ordered]
    colours = [to_rgba(BLUE if line.score >= 0 else RED, 0.8) for line in ordered]
    drawn = PathCollection(
        [_curve(start, end) for start, end in zip(starts, ends, strict=True)],
        facecolors="none",
        edgecolors=colours,
        linewidths=[0.35 + 2.6 * abs(line.score) / strongest for line in ordered],
        linestyles=[LINES[line.port] for line in ordered],
        zorder=2,
    )
    axis.add_collection(drawn, autolim=False)
    # A mark at its end shows that an edge enters a box and does not pass under it.
    xs, ys = zip(*ends, strict=True)
    axis.scatter(xs, ys, s=5, marker="^", c=colours, linewidths=0, zorder=4)


def _curve(start: Point, end: Point) -> Path:
    """A nearly straight line that is vertical at both ends."""
    bend = min(0.25, abs(end[1] - start[1]) / 2)
    vertices = [start, (start[0], start[1] + bend), (end[0], end[1] - bend), end]
    return Path(vertices, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def draw_box(axis: Axes, name: str, place: Point, where: str = "") -> None:
    """Draw the box of a component; ``where`` is added to its id if a component has several boxes."""
    component = Component.find(name)
    box = FancyBboxPatch(
        (place[0] - BOX_WIDTH / 2, place[1] - _BOX_HEIGHT / 2),
        BOX_WIDTH,
        _BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.04",
        facecolor=FILLS["H" if component is None else component.kind],
        edgecolor="0.25",
        linewidth=0.6,
        zorder=3,
        gid=f"component-{name}{where}",
    )
    axis.add_patch(box)
    axis.text(*place, name, fontsize=6, ha="center", va="center_baseline", zorder=5)


def draw_legend(figure: SubFigure, grey: str) -> None:
    """What colours and lines mean; ``grey`` is what a grey line means, if there are any."""
    entries = [
        Line2D([], [], color=BLUE, linewidth=2, label="helps"),
        Line2D([], [], color=RED, linewidth=2, label="hinders"),
        *(Line2D([], [], color="0.3", linewidth=1, linestyle=LINES[end], label=f"into {end}") for end in "qkv"),
    ]
    if grey:
        entries.append(Line2D([], [], color="0.6", linewidth=0.6, label=grey))
    figure.legend(handles=entries, loc="outside upper center", ncols=len(entries), columnspacing=1.2, handlelength=2.2)


def _remark(graph: Graph, scores: Tensor, edges: Sequence[Edge], ranking: Ranking | None) -> str:
    mask = torch.zeros_like(graph.edges)
    mask[tuple(torch.tensor(edges).T)] = True
    on_a_path = int(graph.on_a_path(mask[None]).sum())
    strongest = max(abs(float(scores[edge])) for edge in edges)
    top = "" if ranking is None else f" (the top by {ranking} score)"
    return (
        f"{len(edges):,} of {graph.n_edges:,} edges{top}, {on_a_path:,} of them on a path from the embedding to the "
        f"logits. Width: absolute score, up to {strongest:.2g}. Numbers at the left: layers."
    )

"""A circuit as a drawing: components by layer from bottom to top, kept edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

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
from gatelens.gates.scores import Ranking, rank
from gatelens.model.components import Component
from gatelens.model.graph import Graph
from gatelens.report.layout import Edge, component, layout, links
from gatelens.report.style import BLUE, RED, note, shown, styled

LINES: dict[str, object] = {"q": "-", "k": (0, (4, 1.5)), "v": (0, (1, 1.2)), "": "-"}
FILLS = {"H": "#FFFFFF", "KV": "#E8E8E8", "M": "#FFF3D6"}
_WIDE, _HIGH = 0.44, 0.17  # a box, in inches
_PORTS = {"q": -0.3, "k": 0.0, "v": 0.3, "": 0.0}  # where an edge enters a box, in widths from its middle


@styled
def circuit_figure(
    graph: Graph, scores: Tensor, kept: Tensor | int, title: str = "", ranking: Ranking = "absolute"
) -> Figure:
    """The kept edges and their components. Width: absolute score. Blue edges help the task (above 0), red ones hinder.

    scores: (source, destination). kept: which edges, bool (source, destination), or how many of the best by ranking.
    An edge enters a head at its q (left, solid), k (middle, dashed) or v (right, dotted) side. Where heads share keys
    and values, k and v enter the KV head's box, which is joined by a grey line to its heads that are drawn.
    """
    edges = chosen_edges(graph, scores, kept, ranking)
    places = layout(graph, edges)
    # 1. One unit is one inch, so that boxes and letters keep their size in a figure of any size.
    columns = _columns([x for x, _ in places.values()])
    layers = _layers(places)
    band = min(max(9 / (len(layers) + 1), 0.6), 1.1)
    width, height = max(4.6, 0.5 + columns * (_WIDE + 0.12)), band * (len(layers) + 1)
    low, high = (limit(y for _, y in places.values()) * height for limit in (min, max))
    figure = Figure(figsize=(width + 0.2, high - low + 1.25), layout="constrained")
    above = note(figure, _remark(graph, scores, edges, ranking if isinstance(kept, int) else None))
    axis = above.subplots()
    axis.set(xlim=(0, width), ylim=(low - 0.2, high + 0.2))
    axis.set_axis_off()
    inches = {name: (0.45 + x * (width - 0.5), y * height) for name, (x, y) in places.items()}
    # 2. From back to front: bands, links, weak edges, strong edges, boxes.
    _bands(axis, {layer: y * height for layer, y in layers.items()}, band)
    for ends in links(graph, list(places)):
        axis.plot(*zip(*(inches[name] for name in ends), strict=True), color="0.6", linewidth=0.6, zorder=1.5)
    _edges(axis, graph, scores, edges, inches)
    for name, place in inches.items():
        _box(axis, name, place)
    _legend(above, graph)
    axis.set_title(shown(title))
    return figure


def chosen_edges(graph: Graph, scores: Tensor, kept: Tensor | int, ranking: Ranking = "absolute") -> list[Edge]:
    """The kept edges as (source, destination) numbers, in the order of sources: given as a map, or as a number."""
    if tuple(scores.shape) != (graph.n_sources, graph.n_destinations):
        raise GatelensError(
            f"the scores are {tuple(scores.shape)}, but this model's edges are ({graph.n_sources}, "
            f"{graph.n_destinations}) by source and destination: give scores of the same model."
        )
    if isinstance(kept, int):
        order = graph.edges.nonzero()
        best = order[rank(scores.cpu()[graph.edges], ranking)[: max(kept, 0)]]
        chosen = torch.zeros_like(graph.edges)
        chosen[best[:, 0], best[:, 1]] = True
    else:
        chosen = kept.cpu().bool() & graph.edges
    edges = [(int(source), int(destination)) for source, destination in chosen.nonzero().tolist()]
    if not edges:
        raise GatelensError(f"no edge is kept, so there is nothing to draw: keep 1 to {graph.n_edges:,} edges.")
    return edges


def _columns(xs: Sequence[float]) -> int:
    """How many boxes must fit beside each other for those nearest to each other not to touch."""
    distinct = sorted({round(x, 6) for x in xs})
    gaps = [b - a for a, b in pairwise(distinct)]
    return round(1 / min(gaps)) if gaps else 1


def _layers(names: Iterable[str]) -> dict[str, float]:
    """The height of the middle of each layer that is drawn, in 0..1, from the lowest on."""
    found = {part.layer for name in names if (part := Component.find(name))}
    return {str(layer): (i + 1) / (len(found) + 1) for i, layer in enumerate(sorted(found))}


def _bands(axis: Axes, layers: dict[str, float], band: float) -> None:
    for i, (layer, y) in enumerate(layers.items()):
        if i % 2 == 0:
            axis.axhspan(y - band / 2, y + band / 2, color="0.97", linewidth=0, zorder=0)
        axis.text(0.04, y, layer, fontsize=6.5, color="0.45", va="center", ha="left")


def _edges(
    axis: Axes, graph: Graph, scores: Tensor, edges: Sequence[Edge], inches: dict[str, tuple[float, float]]
) -> None:
    ordered = sorted(edges, key=lambda edge: abs(float(scores[edge])))  # the strongest in front
    strongest = abs(float(scores[ordered[-1]])) or 1.0
    paths, ends, widths, colours, lines = [], [], [], [], []
    for source, destination in ordered:
        name = graph.destination_names[destination]
        port, (x, y) = name.partition(".")[2], inches[component(name)]
        start = inches[graph.source_names[source]]
        score = float(scores[source, destination])
        ends.append((x + _PORTS[port] * _WIDE, y - _HIGH / 2))
        paths.append(_curve((start[0], start[1] + _HIGH / 2), ends[-1]))
        widths.append(0.35 + 2.6 * abs(score) / strongest)
        colours.append(to_rgba(BLUE if score >= 0 else RED, 0.8))
        lines.append(LINES[port])
    drawn = PathCollection(paths, facecolors="none", edgecolors=colours, linewidths=widths, linestyles=lines, zorder=2)
    axis.add_collection(drawn, autolim=False)
    # A point at each entry tells an edge that ends at a box from one that passes under it.
    xs, ys = zip(*ends, strict=True)
    axis.scatter(xs, ys, s=5, marker="^", c=colours, linewidths=0, zorder=4)


def _curve(start: tuple[float, float], end: tuple[float, float]) -> Path:
    """Nearly straight, leaving and entering upright."""
    bend = min(0.25, abs(end[1] - start[1]) / 2)
    vertices = [start, (start[0], start[1] + bend), (end[0], end[1] - bend), end]
    return Path(vertices, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def _box(axis: Axes, name: str, place: tuple[float, float]) -> None:
    part = Component.find(name)
    kind = "H" if part is None else part.kind
    box = FancyBboxPatch(
        (place[0] - _WIDE / 2, place[1] - _HIGH / 2),
        _WIDE,
        _HIGH,
        boxstyle="round,pad=0,rounding_size=0.04",
        facecolor=FILLS[kind],
        edgecolor="0.25",
        linewidth=0.6,
        zorder=3,
        gid=f"component-{name}",
    )
    axis.add_patch(box)
    axis.text(*place, name, fontsize=6, ha="center", va="center_baseline", zorder=5)


def _legend(figure: SubFigure, graph: Graph) -> None:
    entries = [
        Line2D([], [], color=BLUE, linewidth=2, label="helps"),
        Line2D([], [], color=RED, linewidth=2, label="hinders"),
        *(Line2D([], [], color="0.3", linewidth=1, linestyle=LINES[end], label=f"into {end}") for end in "qkv"),
    ]
    if graph.n_kv_heads != graph.n_heads:
        entries.append(Line2D([], [], color="0.6", linewidth=0.6, label="KV head of a head"))
    figure.legend(handles=entries, loc="outside upper center", ncols=len(entries), columnspacing=1.2, handlelength=2.2)


def _remark(graph: Graph, scores: Tensor, edges: Sequence[Edge], ranking: Ranking | None) -> str:
    kept = torch.zeros_like(graph.edges)
    kept[tuple(torch.tensor(edges).T)] = True
    live = int(graph.on_a_path(kept[None]).sum())
    strongest = max(abs(float(scores[edge])) for edge in edges)
    best = "" if ranking is None else f" (the best by {ranking} score)"
    return (
        f"{len(edges):,} of {graph.n_edges:,} edges{best}, {live:,} of them on a path from the embedding to the "
        f"logits. Width: absolute score, up to {strongest:.2g}. At the left: layers."
    )

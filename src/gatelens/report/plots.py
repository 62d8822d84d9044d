"""The figures that ``result.plot()`` draws: one axis each, which may be the user's own.

Every function takes a result and ``ax``, and returns the figure. The figures of a report, which compare several
results, are in `gatelens.report.figures`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates import LEVELS
from gatelens.gates.circuit import Circuit, Explanation
from gatelens.gates.role_edges import RoleEdgeScores
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.gates.scores import Scores
from gatelens.measures.ablation import AblationCurve
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.contrast_result import ContrastResult
from gatelens.measures.counts import Multiplier
from gatelens.measures.curves import Curve
from gatelens.measures.head_attention import HeadAttention
from gatelens.measures.head_table import HeadTable
from gatelens.measures.relations_result import RelationsResult
from gatelens.measures.roles_result import RolesResult
from gatelens.report.figures import circuit_figure, head_maps, relations_figure, role_circuit_figure
from gatelens.report.figures._attention_maps import draw_attention, label_tokens, mark_open
from gatelens.report.figures._relations import draw_relations, panel_width
from gatelens.report.figures._roles import draw_ablation, map_colours
from gatelens.report.figures._style import BLUE, GREY, ORANGE, RED, THIN, NotebookFigure, styled
from gatelens.report.figures._text import shown, shown_token, task_title, wrapped

Ax = Axes | None


def axis_of(ax: Ax, width: float, height: float) -> tuple[Any, Axes]:
    """The figure and the axis to draw on: the user's, or new ones of this size in inches."""
    if ax is not None:
        return ax.figure, ax
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


@styled
def plot_curve(curve: Curve, ax: Ax = None, *, label: str = "", threshold: float = 0.9, title: str = "") -> Any:
    """Explained effect against gates kept, with its 95 % band, the random baseline and the count at a threshold.

    Arguments:
        label: the name of the line in the legend, to compare several curves on one axis.
        threshold: where gates are counted; a dashed line.
    """
    figure, axis = axis_of(ax, 4.6, 2.9)
    level = LEVELS[curve.level]
    kept = curve.kept > 0 if level.log_axis else curve.kept >= 0  # a log scale has no place for 0
    entry = f"{shown(label) or level.noun}, {threshold:.0%}: {curve.counted(threshold)}"
    [line] = axis.plot(curve.kept[kept].tolist(), curve.effect[kept].tolist(), label=entry)
    x = curve.kept[kept].tolist()
    axis.fill_between(x, curve.low[kept].tolist(), curve.high[kept].tolist(), color=line.get_color(), alpha=0.2, lw=0)
    if curve.random is not None:
        drawn = curve.random.kept > 0 if level.log_axis else curve.random.kept >= 0
        baseline = curve.random.kept[drawn].tolist(), curve.random.effect[drawn].tolist()
        axis.plot(*baseline, color=GREY, linewidth=THIN, label="random ranking")
    axis.axhline(threshold, color="0.6", linestyle="--", linewidth=0.8)
    if level.log_axis:
        axis.set_xscale("log")
    axis.set(xlabel=f"{level.noun} kept", ylabel="explained effect", title=shown(title))
    axis.grid(True)
    axis.legend(loc="lower right")
    return figure


@styled
def plot_multiplier(multiplier: Multiplier, ax: Ax = None) -> Any:
    """The multiplier with its 95 % interval, on a log scale; at 1 both models need as many gates."""
    figure, axis = axis_of(ax, 4.4, 1.3)
    low, high = multiplier.interval
    colour = BLUE if multiplier.shows_difference else GREY
    if math.isfinite(multiplier.ratio) and multiplier.ratio > 0:
        axis.plot([multiplier.ratio], [0], "o", color=colour)
        ends = low or multiplier.ratio, high or multiplier.ratio
        axis.plot(ends, [0, 0], color=colour)
        axis.set_xlim(min(0.5, ends[0] / 1.5), max(2, 1.5 * ends[1]))
    axis.axvline(1, color="0.6", linestyle="--", linewidth=0.8)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks([])
    axis.set(xlabel="dense count / sparse count", title=shown(str(multiplier)))
    axis.title.set_wrap(True)
    return figure


@styled
def plot_circuit_result(result: CircuitResult, ax: Ax = None, **options: Any) -> Any:
    """The curve of a circuit result; the options are those of `plot_curve`."""
    title = f"{task_title(result.task)} in {result.model}"
    return plot_curve(result.curve, ax, **{"threshold": result.settings.threshold, "title": title, **options})


@styled
def plot_scores(scores: Scores, ax: Ax = None, *, most: int = 20, title: str = "") -> Any:
    """Scores of heads as a heat map; of gates that do not belong to heads, the highest ones as bars.

    Arguments:
        most: how many bars.
    """
    by_head = scores.by_head()
    title = title or scores.headline().removesuffix(", best first")
    if by_head is not None:
        return _head_map(by_head, ax, title, scores.level.head_map)
    best = scores.top(most)
    figure, axis = axis_of(ax, 5.2, 0.6 + 0.17 * len(best))
    values = [score for *_, score in best]
    axis.barh([shown(name) for _, name, _ in best], values, color=[BLUE if score >= 0 else RED for score in values])
    axis.invert_yaxis()
    axis.axvline(0, color="0.6", linewidth=0.8)
    axis.set(xlabel="score", title=shown(title))
    return figure


def _head_map(values: Tensor, ax: Ax, title: str, label: str) -> Any:
    height = max(2.2, 0.9 + 0.1 * values.shape[0])
    figure, axis = axis_of(ax, max(2.6, 1.6 + 0.13 * values.shape[1]), height)
    array = values.detach().float().cpu().numpy()
    vmin, vmax, colours = map_colours(array.ravel())
    image = axis.imshow(array, vmin=vmin, vmax=vmax, cmap=colours, aspect="auto", origin="lower")
    axis.set(xlabel="head", ylabel="layer", title=shown(title))
    axis.title.set_wrap(True)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(MaxNLocator(8, integer=True))
    figure.colorbar(image, ax=axis, label=wrapped(shown(label), height - 0.4, 8))
    return figure


@styled
def plot_circuit(circuit: Circuit, ax: Ax = None, *, title: str = "") -> Any:
    """A circuit of edges as a graph (by role, with a column for each role); of heads as a map; any other as bars.

    A graph has a size of its own, so it does not take an axis.
    """
    graph = getattr(circuit.scores, "graph", None)
    if ax is None and isinstance(scores := circuit.scores, RoleEdgeScores) and len(circuit):
        names, sees = scores.roles.names, scores.roles.sees
        return role_circuit_figure(scores.graph, names, sees, scores.scores, circuit.mask, title)
    if ax is None and graph is not None and len(circuit):
        return circuit_figure(graph, circuit.scores.gate_sets()[0].scores, circuit.mask, title)
    by_head = circuit.scores.by_head()
    if by_head is not None and circuit.level.shared:
        inside = by_head.where(circuit.mask, torch.nan)
        return _head_map(inside, ax, title or circuit.headline(), circuit.level.head_map)
    return plot_scores(circuit.scores, ax, most=min(len(circuit), 20), title=title or circuit.headline())


@styled
def plot_explanation(explanation: Explanation, ax: Ax = None) -> Any:
    """The probability of right and wrong answers with everything, with the circuit alone, and without it."""
    figure, axis = axis_of(ax, 4.2, 1.9)
    names = [part.part for part in explanation.parts]
    places = np.arange(len(names))
    axis.barh(places - 0.18, [part.probability for part in explanation.parts], 0.34, color=BLUE, label="right")
    if all(part.wrong is not None for part in explanation.parts):
        axis.barh(places + 0.18, [part.wrong or 0.0 for part in explanation.parts], 0.34, color=ORANGE, label="wrong")
    for place, part in zip(places, explanation.parts, strict=True):
        axis.annotate(f" rank {part.rank:,}", (part.probability, place - 0.18), va="center", fontsize=7)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    largest = max(max(part.probability, part.wrong or 0.0) for part in explanation.parts)
    axis.set(xlim=(0, min(1.25 * largest, 1.15)), xlabel="probability", title=shown(explanation.headline()))
    axis.title.set_wrap(True)
    axis.legend(loc="lower right")
    return figure


@styled
def plot_roles(roles: HeadRoles, ax: Ax = None, *, kind: str = "", title: str = "") -> Any:
    """Heat maps of the three kinds of role, mean over seeds; with ``kind`` or on one axis, of one kind.

    Arguments:
        kind: facilitation (the default on one axis), irrelevance or interference.
    """
    if ax is None and not kind:
        return head_maps({name: roles.kind(name).mean(0) for name in KINDS}, title, "mean over seeds")
    kind = kind or KINDS[0]
    return _head_map(roles.kind(kind).mean(0), ax, title or kind, "mean over seeds")


@styled
def plot_roles_result(result: RolesResult, ax: Ax = None) -> Any:
    """Change in log-probability of the response against ablated heads, for each kind and a random order."""
    figure, axis = axis_of(ax, 4.6, 2.9)
    draw_ablation(axis, result.curves)
    axis.set(
        xlabel="ablated heads", ylabel="change in log-probability", title=f"{task_title(result.task)} in {result.model}"
    )
    axis.legend(loc="best")
    return figure


@styled
def plot_contrast_result(result: ContrastResult, ax: Ax = None, *, title: str = "") -> Any:
    """The gates of all heads as a heat map, mean over seeds."""
    title = title or f"keep {result.keep}, lose {result.lose}, in {result.model}"
    return _head_map(result.contrast.gates.mean(0), ax, title, "mean gate")


@styled
def plot_relations_result(result: RelationsResult, ax: Ax = None, *, keep: str = "") -> Any:
    """Accuracy on each relation that was held out; `relations_figure` describes it.

    Arguments:
        keep: the way of asking that is kept, for one panel; by default all ways, and on one axis the first.
    """
    if ax is None and not keep:
        return relations_figure(result)
    ways = list(dict.fromkeys(fit.keep for fit in result.fits))
    if (keep := keep or next(iter(ways), "")) not in ways:
        raise GatelensError(f"no fit keeps the way '{keep}': the ways are {', '.join(ways) or 'none'}.")
    fits = [fit for fit in result.fits if fit.keep == keep]
    figure, axis = axis_of(ax, 1.2 + panel_width(fits), 2.9)
    draw_relations(axis, fits)
    axis.set_ylabel("response tokens predicted")
    return figure


@styled
def plot_ablation(curve: AblationCurve, ax: Ax = None) -> Any:
    """Change in log-probability of the response against ablated heads of one kind."""
    figure, axis = axis_of(ax, 4.2, 2.6)
    draw_ablation(axis, [curve])
    axis.set(xlabel="ablated heads", ylabel="change in log-probability", title=f"heads by {curve.kind}")
    return figure


@styled
def plot_head_table(table: HeadTable, ax: Ax = None) -> Any:
    """The score of each head with its 95 % interval, and its kind; the dense model beside it if the table has one."""
    figure, axis = axis_of(ax, 5.4, 0.8 + 0.24 * len(table))
    places = np.arange(len(table.lines))
    tables = [(table, BLUE, 0.0)] if table.dense is None else [(table.dense, ORANGE, -0.15), (table, BLUE, 0.15)]
    for each, colour, shift in tables:
        lines = [each[line.head] for line in table.lines]
        middle = np.array([line.score for line in lines])
        ends = np.array([[line.score - line.low, line.high - line.score] for line in lines]).T.clip(min=0)
        label = shown(each.model)
        axis.errorbar(middle, places + shift, xerr=ends, fmt="o", color=colour, ms=4, lw=1.2, label=label)
    kinds = [f"{line.head}  {', '.join(line.kinds)}".rstrip() for line in table.lines]
    axis.set_yticks(places, kinds)
    axis.invert_yaxis()
    axis.axvline(0, color="0.6", linewidth=0.8)
    axis.grid(True, axis="x")
    axis.set(
        xlabel=f"fall of the {table.metric} without the head",
        title=f"{task_title(table.task)}, {table.prompts} prompts",
    )
    if table.dense is not None:
        axis.legend(loc="lower right")
    return figure


@styled
def plot_attention(attention: HeadAttention, ax: Ax = None) -> Any:
    """Where each position looks; rings are open gates of a sparse model."""
    side = max(2.2, 0.15 * len(attention.tokens))
    figure, axis = axis_of(ax, side + 1.9, side + 0.9)
    image = draw_attention(axis, attention.weights)
    if attention.open is not None:
        mark_open(axis, attention.open, side / len(attention.tokens))
    label_tokens(axis, [shown_token(token) for token in attention.tokens])
    axis.set(xlabel="key", ylabel="query", title=shown(f"{attention.head} in {attention.model}"))
    figure.colorbar(image, ax=axis, label="attention")
    return figure

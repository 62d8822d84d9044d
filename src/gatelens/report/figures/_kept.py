"""Explained effect against the number of gates kept: heads, edges between components, or attention edges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from gatelens.errors import GatelensError
from gatelens.gates import LEVELS
from gatelens.measures.curves import Curve, multiplier
from gatelens.report.figures._style import GREY, THIN, colours, log_axis, note, panel_axes, power, shape, styled
from gatelens.report.figures._text import shown, task_title, wrapped

Pair = tuple[str, str]  # the dense model and the sparse one
Panel = Mapping[str, Curve]  # [model]
_VALUES = {"corrupt": "its corrupt value", "mean": "its mean", "zero": "zero"}
_PANEL_LEGEND = 3  # the legend of a panel has room for this many models


@styled
def kept_figure(panels: Mapping[str, Panel], *, threshold: float = 0.9, pairs: Sequence[Pair] | None = None) -> Figure:
    """Explained effect against the number of gates kept: one panel per task, one line with its 95 % band per model.

    A model has the same colour in every panel. A dashed line at the threshold connects the counts of a dense and a
    sparse model; the multiplier (dense count / sparse count) stands above it. If a curve does not reach the threshold,
    the legend says so. The x scale is linear for heads and log10 for edges, where the point that keeps no edge is
    left out.

    Arguments:
        panels: the curves, ``panels[task][model]``. A task does not need a curve for every model.
        threshold: the explained effect at which gates are counted.
        pairs: names of (dense, sparse) models to compare. Default: the two models of a panel, in this order; with more
            than two models, every model with the one that has the same name after ``sparse-``.
    """
    level = _level(panels)
    models = list(dict.fromkeys(model for curves in panels.values() for model in curves))
    pairs_by_task = {task: _pairs(list(curves), pairs) for task, curves in panels.items()}
    paired_models = [model for task_pairs in pairs_by_task.values() for pair in task_pairs for model in pair]
    styles = colours([*paired_models, *models])
    # 1. Panels of the same size. With many models, one legend beside them, because it would hide the curves.
    in_panels = max(len(curves) for curves in panels.values()) <= _PANEL_LEGEND
    rows, columns = shape(len(panels))
    width = 0.5 + 2.35 * max(columns, 1.4) + (0 if in_panels else 0.6 + 0.06 * max(map(len, models)))
    figure = Figure(figsize=(width, 0.75 + 1.95 * rows), layout="constrained")
    above = note(figure, _remark(panels, threshold))
    axes = panel_axes(above, len(panels), sharey=True)
    axes[0].set_ylim(*_effect_limits(panels))
    # 2. The contents of each panel.
    for axis, (task, curves) in zip(axes, panels.items(), strict=True):
        _scale(axis, level, curves)
        _draw(axis, curves, styles, threshold, in_panels)
        _compare(axis, curves, styles, pairs_by_task[task], threshold)
        axis.set_title(wrapped(task_title(task), 2.0))
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="lower right", frameon=True, framealpha=0.8, edgecolor="none", borderpad=0.2)
    # 3. What all panels share.
    if not in_panels:
        _legend(above, styles, any(curve.random for curves in panels.values() for curve in curves.values()))
    noun = " ".join(word[0].upper() + word[1:] for word in LEVELS[level].noun.split())  # title() would write "Mlps"
    above.supxlabel(f"Number of {noun} Kept")
    above.supylabel("Explained Effect")
    return figure


def _level(panels: Mapping[str, Panel]) -> str:
    levels = {curve.level for curves in panels.values() for curve in curves.values()}
    if len(levels) != 1:
        given = f"these are of {' and '.join(sorted(levels))}" if levels else "there is no curve"
        raise GatelensError(
            f"a figure of gates kept needs curves of one level, and {given}: draw one figure per level."
        )
    return levels.pop()


def _pairs(models: Sequence[str], asked: Sequence[Pair] | None) -> list[Pair]:
    """The pairs whose models both have a curve in the panel."""
    by_name = [(model, f"sparse-{model}") for model in models]
    if asked is None:
        asked = by_name
        if len(models) == 2 and (models[1], models[0]) not in by_name:
            asked = [(models[0], models[1])]
    return [pair for pair in asked if pair[0] in models and pair[1] in models]


def _scale(axis: Axes, level: str, curves: Panel) -> None:
    most = max((curve.total for curve in curves.values()), default=1)
    if LEVELS[level].log_axis:
        log_axis(axis, "x", 0.8, 1.25 * most, power)
    else:
        axis.set_xlim(0, most)
    axis.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    axis.grid()


def _effect_limits(panels: Mapping[str, Panel]) -> tuple[float, float]:
    """The y limits: a little beyond 0 and 1, or as far as the means go (signed rankings overshoot), in -1..2.5."""
    means = [value for curves in panels.values() for curve in curves.values() for value in _points(curve)[1]]
    return max(min([0.0, *means]) - 0.05, -1.0), min(max([1.05, *means]) + 0.05, 2.5)


def _draw(axis: Axes, curves: Panel, styles: Mapping[str, tuple[str, str]], threshold: float, in_panels: bool) -> None:
    """Draw the lines of a panel. in_panels: whether the panel's own legend names the models."""
    baselines = [curve.random for curve in curves.values() if curve.random is not None]
    for random in baselines:
        x, y = _points(random)[:2]
        axis.plot(x, y, color=GREY, linewidth=THIN, zorder=1.5, label="_random")
    for model, curve in curves.items():
        colour, line = styles[model]
        x, y, low, high = _points(curve)
        label = _entry(shown(model)) if in_panels else f"_{model}"
        if curve.count_at(threshold) is None:
            label = _entry(f"{shown(model)} (below {threshold:g})")
        axis.plot(x, y, line, color=colour, label=label)
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    if baselines and in_panels:
        axis.plot([], [], color=GREY, linewidth=THIN, label="random")
    if not curves:
        axis.text(0.5, 0.5, "no curve", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_xticks([])


def _compare(
    axis: Axes,
    curves: Panel,
    styles: Mapping[str, tuple[str, str]],
    pairs: Sequence[Pair],
    threshold: float,
) -> None:
    """Draw a dashed line between the counts of each pair, and the multiplier (of several pairs: in the legend)."""
    for dense, sparse in pairs:
        counts = [curves[name].count_at(threshold) for name in (dense, sparse)]
        ends = [max(count, axis.get_xlim()[0]) for count in counts if count is not None]
        if len(ends) < 2:
            continue
        ratio = multiplier(curves[dense], curves[sparse], threshold)
        alone = len(pairs) == 1
        label = "_multiplier" if alone else _entry(f"{shown(dense)} / {shown(sparse)}: {ratio.brief}")
        colour = GREY if not ratio.shows_difference else "0.15" if alone else styles[sparse][0]
        axis.plot(ends, [threshold] * 2, "--", color=colour, linewidth=0.9, zorder=3, label=label)
        if alone:
            _above(axis, ends, threshold, ratio.brief, colour)


def _entry(text: str) -> str:
    """A text that fits into the legend of a panel."""
    return wrapped(text, 1.7, 7)


def _legend(figure: SubFigure, styles: Mapping[str, tuple[str, str]], random: bool) -> None:
    """Draw one legend beside all panels, if there are too many models to name them in each panel."""
    lines = [Line2D([], [], color=colour, linestyle=line, label=shown(name)) for name, (colour, line) in styles.items()]
    if random:
        lines.append(Line2D([], [], color=GREY, linewidth=THIN, label="random"))
    figure.legend(handles=lines, loc="outside right upper")


def _points(curve: Curve) -> tuple[list[float], list[float], list[float], list[float]]:
    """Counts, effects, and the lower and upper ends of the band. A log scale has no place for the count 0."""
    points = zip(*(x.tolist() for x in (curve.kept, curve.effect, curve.low, curve.high)), strict=True)
    drawn = [point for point in points if point[0] > 0 or not LEVELS[curve.level].log_axis]
    counts, effects, low, high = ([point[i] for point in drawn] for i in range(4))
    return counts, effects, low, high


def _above(axis: Axes, ends: Sequence[float], threshold: float, text: str, colour: str) -> None:
    """Write the multiplier above the middle of its line, inside the panel."""
    low, high = axis.get_xlim()
    log = axis.get_xscale() == "log"
    middle = math.sqrt(ends[0] * ends[1]) if log else sum(ends) / 2
    place = math.log(middle / low) / math.log(high / low) if log else (middle - low) / (high - low)
    written = axis.annotate(
        text,
        (min(max(place, 0.28), 0.72), threshold),
        xycoords=("axes fraction", "data"),
        xytext=(0, 1.5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7,
        color=colour,
        zorder=4,
    )
    written.set_path_effects([patheffects.withStroke(linewidth=2, foreground="white")])


def _remark(panels: Mapping[str, Panel], threshold: float) -> str:
    """How the gates were ranked and what replaces the others, for each model if models differ."""
    models_by_choice: dict[tuple[str, str], list[str]] = {}
    for curves in panels.values():
        for model, curve in curves.items():
            models = models_by_choice.setdefault((curve.ranking, curve.source), [])
            models += [model] if model not in models else []
    choices = [
        f"ranked by {ranking} score, everything else is set to {_VALUES.get(source, source)}"
        + (f" ({', '.join(models)})" if len(models_by_choice) > 1 else "")
        for (ranking, source), models in models_by_choice.items()
    ]
    text = "; ".join(choices)
    return f"{text[0].upper()}{text[1:]}. Bands: 95 %. Dashed: counts at {threshold:g} of the effect."

"""Explained effect against the number of gates kept: heads, edges between components, or attention edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gatelens.errors import GatelensError
from gatelens.gates import LEVELS
from gatelens.measures.curves import Curve, multiplier
from gatelens.report.figures._kept_caption import caption
from gatelens.report.figures._style import GREY, THIN, colours, log_axis, note, panel_axes, power, shape, styled
from gatelens.report.figures._text import shown, task_title, wrapped

Pair = tuple[str, str]  # the dense model and the sparse one
Panel = Mapping[str, Curve]  # [model]
Styles = Mapping[str, tuple[str, str]]  # [model] -> colour and line style
_PANEL = 2.35  # inches
_SMALL = 7.0  # points


@styled
def kept_figure(panels: Mapping[str, Panel], *, threshold: float = 0.9, pairs: Sequence[Pair] | None = None) -> Figure:
    """Explained effect against the number of gates kept: one panel per task, one line with its 95 % band per model.

    A model has the same colour in every panel, and its random baseline is a dotted line of this colour with a band of
    its own. A dashed line at the threshold connects the counts of a dense and a sparse model; the multiplier (dense
    count / sparse count) stands above the panel, grey if its interval contains 1. The axes contain all lines and
    bands. The x scale is linear for heads and log10 for edges, where the point that keeps no edge is left out. The
    caption says how gates were ranked, on how many prompts, and what the bands are.

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
    # 1. Panels of the same size, with room for the legend and results above them, and for the caption below.
    rows, columns = shape(len(panels))
    width = 0.5 + _PANEL * max(columns, 1.4)
    results = {
        task: _results(curves, styles, pairs_by_task[task], threshold, width / columns)
        for task, curves in panels.items()
    }
    handles = _handles(panels, styles)
    longest = max(len(str(handle.get_label())) for handle in handles)
    in_a_row = max(1, min(len(handles), int(width / (0.45 + 0.065 * longest))))
    n_lines = max(sum(text.count("\n") + 1 for text, _ in above) for above in results.values())
    height = 0.75 + 0.15 * -(-len(handles) // in_a_row) + (1.95 + 0.13 * n_lines) * rows
    figure = Figure(figsize=(width, height), layout="constrained")
    above = note(figure, caption(panels, threshold, any(pairs_by_task.values())))
    axes = panel_axes(above, len(panels), sharey=True)
    limits = _effect_limits(panels)
    axes[0].set_ylim(*limits)
    # 2. The contents of each panel.
    for axis, (task, curves) in zip(axes, panels.items(), strict=True):
        _scale(axis, level, curves, limits)
        _draw(axis, curves, styles)
        _connect_counts(axis, curves, styles, pairs_by_task[task], threshold)
        _write_above(axis, task_title(task), results[task], n_lines)
    # 3. What all panels share.
    above.legend(handles=handles, loc="outside upper center", ncols=in_a_row)
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


def _scale(axis: Axes, level: str, curves: Panel, limits: tuple[float, float]) -> None:
    most = max((curve.total for curve in curves.values()), default=1)
    if LEVELS[level].log_axis:
        log_axis(axis, "x", 0.8, 1.25 * most, power)
    else:
        axis.set_xlim(-0.02 * most, 1.02 * most)
    if limits[0] > -0.5 and limits[1] < 1.5:
        axis.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    else:
        axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.grid()


def _effect_limits(panels: Mapping[str, Panel]) -> tuple[float, float]:
    """The y limits: a little beyond all lines and bands, and at least a little beyond 0 and 1."""
    curves = [curve for by_model in panels.values() for curve in by_model.values()]
    drawn = [*curves, *(curve.random for curve in curves if curve.random is not None)]
    values = [value for curve in drawn for part in _points(curve)[1:] for value in part]
    low, high = min([0.0, *values]), max([1.0, *values])
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _draw(axis: Axes, curves: Panel, styles: Styles) -> None:
    """Draw the lines and bands of a panel, the random baselines below all others."""
    for model, curve in curves.items():
        colour, line = styles[model]
        if curve.random is not None:
            _line(axis, curve.random, f"_random {model}", colour, ":", THIN + 0.2, 0.08)
        _line(axis, curve, f"_{model}", colour, line, None, 0.2)
    if not curves:
        axis.text(0.5, 0.5, "no curve", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_xticks([])


def _line(axis: Axes, curve: Curve, label: str, colour: str, line: str, width: float | None, alpha: float) -> None:
    x, y, low, high = _points(curve)
    below = 1.5 if width is not None else 2.0
    axis.plot(x, y, line, color=colour, label=label, linewidth=width, zorder=below)
    axis.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0, zorder=below - 0.5)


def _connect_counts(axis: Axes, curves: Panel, styles: Styles, pairs: Sequence[Pair], threshold: float) -> None:
    """Draw a dashed line between the counts of each pair. Its ends have marks, because they may be close together."""
    for dense, sparse in pairs:
        counts = [curves[name].count_at(threshold) for name in (dense, sparse)]
        ends = [max(float(count), axis.get_xlim()[0]) for count in counts if count is not None]
        if len(ends) == 2:
            colour = _result_colour(curves, styles, (dense, sparse), threshold, len(pairs) == 1)
            axis.plot(ends, [threshold] * 2, "--|", color=colour, linewidth=0.9, zorder=3, label="_counts")


def _result_colour(curves: Panel, styles: Styles, pair: Pair, threshold: float, alone: bool) -> str:
    """Grey if the prompts show no difference; otherwise dark or, of several pairs, the colour of the sparse model."""
    if not multiplier(curves[pair[0]], curves[pair[1]], threshold).shows_difference:
        return GREY
    return "0.15" if alone else styles[pair[1]][0]


def _results(
    curves: Panel, styles: Styles, pairs: Sequence[Pair], threshold: float, width: float
) -> list[tuple[str, str]]:
    """What stands above a panel, as text and colour: multipliers, and which models do not reach the threshold."""
    results: list[tuple[str, str]] = []
    for dense, sparse in pairs:
        if any(curves[name].count_at(threshold) is None for name in (dense, sparse)):
            continue
        ratio = multiplier(curves[dense], curves[sparse], threshold)
        names = "" if len(pairs) == 1 else f"{shown(dense)} / {shown(sparse)}: "
        colour = _result_colour(curves, styles, (dense, sparse), threshold, len(pairs) == 1)
        lines = [wrapped(f"{names}{ratio.brief}", width - 0.3, _SMALL), *([ratio.verdict] if ratio.verdict else [])]
        results.append(("\n".join(lines), colour))
    for model, curve in curves.items():
        if curve.count_at(threshold) is None:
            text = f"{shown(model)} stays below {threshold:g}"
            results.append((wrapped(text, width - 0.3, _SMALL), styles[model][0]))
    return results


def _write_above(axis: Axes, title: str, results: Sequence[tuple[str, str]], n_lines: int) -> None:
    """The title of a panel, and below it the results, the first one next to the title.

    Arguments:
        n_lines: lines of the panel with the most results. All titles stand at the same height.
    """
    line = 1.25 * _SMALL  # points
    top = 2 + line * n_lines
    axis.set_title(wrapped(title, 2.0), pad=top + 2)
    for text, colour in results:
        top -= line * (text.count("\n") + 1)
        axis.annotate(
            text,
            (0.5, 1),
            xycoords="axes fraction",
            xytext=(0, top),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=_SMALL,
            color=colour,
        )


def _handles(panels: Mapping[str, Panel], styles: Styles) -> list[Line2D]:
    """The entries of the legend: only lines that are drawn."""
    handles = [
        Line2D([], [], color=colour, linestyle=line, label=shown(name)) for name, (colour, line) in styles.items()
    ]
    randoms = [curve.random for curves in panels.values() for curve in curves.values() if curve.random is not None]
    if any(len(_points(random)[0]) > 1 for random in randoms):
        handles.append(Line2D([], [], color="0.4", linestyle=":", linewidth=THIN + 0.2, label="random order"))
    return handles


def _points(curve: Curve) -> tuple[list[float], list[float], list[float], list[float]]:
    """Counts, effects, and the lower and upper ends of the band. A log scale has no place for the count 0."""
    points = zip(*(x.tolist() for x in (curve.kept, curve.effect, curve.low, curve.high)), strict=True)
    drawn = [point for point in points if point[0] > 0 or not LEVELS[curve.level].log_axis]
    counts, effects, low, high = ([point[i] for point in drawn] for i in range(4))
    return counts, effects, low, high

"""Explained effect against the number of gates kept: heads, edges between components, or attention edges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from gatelens.errors import GatelensError
from gatelens.measures.curves import Curve, multiplier
from gatelens.report.style import (
    GREY,
    colours,
    log_axis,
    note,
    panel_axes,
    power,
    shape,
    shown,
    styled,
    task_title,
    wrapped,
)

NOUNS = {"heads": "Heads", "edges": "Edges", "attention": "Attention Edges"}
Pair = tuple[str, str]  # the dense model and the sparse one
_THIN = 0.7  # the line of a random baseline
_NAMED = 3  # models that the legend of a panel has room for


@styled
def kept_figure(
    panels: Mapping[str, Mapping[str, Curve]], *, threshold: float = 0.9, pairs: Sequence[Pair] | None = None
) -> Figure:
    """One panel for each task, one line with its 95 % band for each model: ``panels[task][model]`` is a curve.

    A model has the same colour in every panel. Dashed, at the threshold: from the count of the one curve of a pair to
    that of the other, with the multiplier (dense count / sparse count) above. A curve that does not reach the
    threshold is said to be below it, in the legend. A task may lack a model's curve.

    pairs: (dense, sparse) names. By default the two models of a panel in their order, or, where there are more,
    every model with the one called ``sparse-`` and its name. Edges have a log10 x scale, where no gate at all (0) has
    no place.
    """
    level = _level(panels)
    models = list(dict.fromkeys(model for curves in panels.values() for model in curves))
    chosen = {task: _pairs(list(curves), pairs) for task, curves in panels.items()}
    in_pairs = [model for found in chosen.values() for pair in found for model in pair]
    styles = colours([*in_pairs, *models])
    # 1. Panels of the same size, with room for a legend beside them if theirs would hide the curves.
    named = max(len(curves) for curves in panels.values()) <= _NAMED
    rows, columns = shape(len(panels))
    width = 0.5 + 2.35 * max(columns, 1.4) + (0 if named else 0.6 + 0.06 * max(map(len, models)))
    figure = Figure(figsize=(width, 0.75 + 1.95 * rows), layout="constrained")
    above = note(figure, _remark(panels, threshold))
    axes = panel_axes(above, len(panels), sharey=True)
    axes[0].set_ylim(*_height(panels))
    # 2. What each panel shows.
    for axis, (task, curves) in zip(axes, panels.items(), strict=True):
        _scale(axis, level, curves)
        _draw(axis, curves, styles, threshold, named)
        _compare(axis, curves, styles, chosen[task], threshold)
        axis.set_title(wrapped(task_title(task), 2.0))
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="lower right", frameon=True, framealpha=0.8, edgecolor="none", borderpad=0.2)
    # 3. What they share.
    if not named:
        _legend(above, styles, any(curve.random for curves in panels.values() for curve in curves.values()))
    above.supxlabel(f"Number of {NOUNS[level]} Kept")
    above.supylabel("Explained Effect")
    return figure


def _level(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    levels = {curve.level for curves in panels.values() for curve in curves.values()}
    if len(levels) != 1:
        found = " and ".join(sorted(levels)) if levels else "no curve at all"
        raise GatelensError(f"a figure of gates kept needs curves of one level, not {found}: draw a figure for each.")
    return levels.pop()


def _pairs(models: Sequence[str], asked: Sequence[Pair] | None) -> list[Pair]:
    """The pairs of a panel, both of whose models are there."""
    by_name = [(model, f"sparse-{model}") for model in models]
    if asked is None:
        asked = by_name
        if len(models) == 2 and (models[1], models[0]) not in by_name:
            asked = [(models[0], models[1])]
    return [pair for pair in asked if pair[0] in models and pair[1] in models]


def _scale(axis: Axes, level: str, curves: Mapping[str, Curve]) -> None:
    most = max((curve.total for curve in curves.values()), default=1)
    if level == "heads":
        axis.set_xlim(0, most)
    else:
        log_axis(axis, "x", 0.8, 1.25 * most, power)
    axis.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    axis.grid()


def _height(panels: Mapping[str, Mapping[str, Curve]]) -> tuple[float, float]:
    """A little beyond 0 and 1; further, but not without end, where a mean goes further, as signed rankings do."""
    means = [value for curves in panels.values() for curve in curves.values() for value in _points(curve)[1]]
    return max(min([0.0, *means]) - 0.05, -1.0), min(max([1.05, *means]) + 0.05, 2.5)


def _draw(
    axis: Axes, curves: Mapping[str, Curve], styles: Mapping[str, tuple[str, str]], threshold: float, named: bool
) -> None:
    """The lines of a panel; named: its legend is to say which is which, not that of the figure."""
    baselines = [curve.random for curve in curves.values() if curve.random is not None]
    for random in baselines:
        x, y = _points(random)[:2]
        axis.plot(x, y, color=GREY, linewidth=_THIN, zorder=1.5, label="_random")
    for model, curve in curves.items():
        colour, line = styles[model]
        x, y, low, high = _points(curve)
        label = _entry(shown(model)) if named else f"_{model}"
        if curve.count_at(threshold) is None:
            label = _entry(f"{shown(model)} (below {threshold:g})")
        axis.plot(x, y, line, color=colour, label=label)
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    if baselines and named:
        axis.plot([], [], color=GREY, linewidth=_THIN, label="random")
    if not curves:
        axis.text(0.5, 0.5, "no curve", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_xticks([])


def _compare(
    axis: Axes,
    curves: Mapping[str, Curve],
    styles: Mapping[str, tuple[str, str]],
    pairs: Sequence[Pair],
    threshold: float,
) -> None:
    """Dashed lines between the counts of pairs; the multiplier stands above, or in the legend if there are several."""
    for dense, sparse in pairs:
        counts = [curves[name].count_at(threshold) for name in (dense, sparse)]
        ends = [max(count, axis.get_xlim()[0]) for count in counts if count is not None]
        if len(ends) < 2:
            continue
        times = _times(multiplier(curves[dense], curves[sparse], threshold))
        alone = len(pairs) == 1
        label = "_multiplier" if alone else _entry(f"{shown(dense)} / {shown(sparse)}: {times}")
        colour = "0.15" if alone else styles[sparse][0]
        axis.plot(ends, [threshold] * 2, "--", color=colour, linewidth=0.9, zorder=3, label=label)
        if alone:
            _above(axis, ends, threshold, times)


def _entry(text: str) -> str:
    """A text for the legend of a panel, within its width."""
    return wrapped(text, 1.7, 7)


def _legend(figure: SubFigure, styles: Mapping[str, tuple[str, str]], random: bool) -> None:
    """One legend beside all panels, where there are too many models to name them in each."""
    lines = [Line2D([], [], color=colour, linestyle=line, label=shown(name)) for name, (colour, line) in styles.items()]
    if random:
        lines.append(Line2D([], [], color=GREY, linewidth=_THIN, label="random"))
    figure.legend(handles=lines, loc="outside right upper")


def _points(curve: Curve) -> tuple[list[float], list[float], list[float], list[float]]:
    """Kept, effect, low and high; without the points that keep nothing where the x scale is a log."""
    rows = zip(*(x.tolist() for x in (curve.kept, curve.effect, curve.low, curve.high)), strict=True)
    drawn = [row for row in rows if curve.level == "heads" or row[0] > 0]
    kept, effect, low, high = ([row[i] for row in drawn] for i in range(4))
    return kept, effect, low, high


def _times(ratio: float) -> str:
    return "∞x" if math.isinf(ratio) else f"{ratio:.1f}x"


def _above(axis: Axes, ends: Sequence[float], threshold: float, text: str) -> None:
    """The multiplier above the middle of its line, inside the panel."""
    low, high = axis.get_xlim()
    log = axis.get_xscale() == "log"
    middle = math.sqrt(ends[0] * ends[1]) if log else sum(ends) / 2
    place = math.log(middle / low) / math.log(high / low) if log else (middle - low) / (high - low)
    written = axis.annotate(
        text,
        (min(max(place, 0.1), 0.9), threshold),
        xycoords=("axes fraction", "data"),
        xytext=(0, 1.5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        zorder=4,
    )
    written.set_path_effects([patheffects.withStroke(linewidth=2, foreground="white")])


def _remark(panels: Mapping[str, Mapping[str, Curve]], threshold: float) -> str:
    """Which ranking, and what is left out is put to: for each model where they differ."""
    made: dict[tuple[str, str], list[str]] = {}
    for curves in panels.values():
        for model, curve in curves.items():
            models = made.setdefault((curve.ranking, curve.source), [])
            models += [model] if model not in models else []
    how = [
        f"ranked by {ranking} score, what is left out is {_put(source)}"
        + (f" ({', '.join(who)})" if len(made) > 1 else "")
        for (ranking, source), who in made.items()
    ]
    text = "; ".join(how)
    return f"{text[0].upper()}{text[1:]}. Bands: 95 %. Dashed: counts at {threshold:g} of the effect."


def _put(source: str) -> str:
    return {"corrupt": "put to its corrupt value", "mean": "put to its mean", "zero": "put to zero"}.get(source, source)

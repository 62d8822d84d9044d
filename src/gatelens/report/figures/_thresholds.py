"""Figure of multipliers: dense count / sparse count against the threshold at which gates are counted."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gatelens.errors import GatelensError
from gatelens.gates import LEVELS
from gatelens.measures.thresholds import ThresholdLine
from gatelens.report.figures._style import GREY, NotebookFigure, colours, log_axis, note, panel_axes, shape, styled
from gatelens.report.figures._text import shown, task_title, wrapped

_CAPTION = (
    "Bars: 95 %, paired bootstrap over prompts. Grey: the interval contains 1, so these prompts show no difference. "
    "Above the dashed line the sparse model needs fewer gates. An arrow is an interval without an end. Where "
    "grids were not refined, the bars contain the step of the grid too."
)


@styled
def thresholds_figure(lines: Sequence[ThresholdLine]) -> Figure:
    """One panel per task: the multiplier of each sparse model, with its 95 % interval, at every threshold.

    The axis of the multiplier is logarithmic, so that 2x and 0.5x are equally far from 1. A threshold that a model does
    not reach has no bar.

    Arguments:
        lines: the lines of one level (`threshold_lines`).
    """
    levels = {line.level for line in lines}
    if len(levels) != 1:
        raise GatelensError("a figure of multipliers needs lines of one level: draw one figure per level.")
    tasks = list(dict.fromkeys(line.task for line in lines))
    models = list(dict.fromkeys((line.dense, line.sparse, line.method) for line in lines))
    styles = colours(" ".join(model) for model in models)
    rows, columns = shape(len(tasks))
    figure = NotebookFigure(figsize=(0.6 + 2.1 * max(columns, 2), 0.9 + 1.9 * rows), layout="constrained")
    above = note(figure, _CAPTION)
    axes = panel_axes(above, len(tasks), sharey=True, sharex=True)
    ends = [end for line in lines for end in (line.multiplier, line.multiplier_low, line.multiplier_high) if end]
    low, high = min([0.5, *ends]) / 1.3, max([2.0, *ends]) * 1.3
    for axis, task in zip(axes, tasks, strict=True):
        log_axis(axis, "y", low, high, lambda value: f"{value:g}x", times=(1, 2, 5))
        axis.axhline(1, color="0.4", linewidth=0.8, linestyle="--")
        axis.set_title(wrapped(task_title(task), 2.0))
        axis.grid(axis="y")
        for line in (line for line in lines if line.task == task):
            model = (line.dense, line.sparse, line.method)
            shift = 0.02 * (models.index(model) - (len(models) - 1) / 2)
            _draw(axis, line, line.threshold + shift, styles[" ".join(model)][0], (low, high))
    axes[0].set_xticks(sorted({line.threshold for line in lines}))
    axes[0].margins(x=0.08)
    noun = LEVELS[levels.pop()].noun
    above.supxlabel("Explained effect at which gates are counted")
    above.supylabel(wrapped(f"{noun[0].upper()}{noun[1:]}: dense count / sparse count", 2.2))
    if len(models) > 1:
        above.legend(handles=_handles(axes[0], styles), loc="outside upper center", ncols=min(3, len(models)))
    return figure


def _draw(axis: Axes, line: ThresholdLine, x: float, colour: str, limits: tuple[float, float]) -> None:
    """A dot at the multiplier and a bar along its interval; an open end is an arrow at the edge of the panel."""
    if line.multiplier is None:
        return
    colour = colour if line.shows_difference else GREY
    low = limits[0] if line.multiplier_low is None else line.multiplier_low
    high = limits[1] if line.multiplier_high is None else line.multiplier_high
    axis.plot([x, x], [low, high], color=colour, linewidth=1.2)
    axis.plot([x], [line.multiplier], "o", color=colour, markersize=4)
    for is_open, end, mark in ((line.multiplier_low is None, low, "v"), (line.multiplier_high is None, high, "^")):
        if is_open:
            axis.plot([x], [end], mark, color=colour, markersize=4, clip_on=False)


def _handles(axis: Axes, styles: dict[str, tuple[str, str]]) -> list[object]:
    return [
        axis.plot([], [], "o", color=colour, markersize=4, label=shown(name))[0] for name, (colour, _) in styles.items()
    ]

"""Figure of methods: how many gates each method needs for each task, in each model."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gatelens.errors import GatelensError
from gatelens.gates import LEVELS
from gatelens.measures.method_comparison import MethodLine, method_ranks
from gatelens.report.figures._style import NotebookFigure, colours, log_axis, note, panel_axes, power, shape, styled
from gatelens.report.figures._text import shown, task_title, wrapped


@styled
def methods_figure(lines: Sequence[MethodLine]) -> Figure:
    """One panel per task; for each method a dot per model at the gates needed, with the 95 % interval.

    Methods are in the order of their mean rank, the best one at the top. A method that does not reach the threshold has
    a cross at the right edge. The axis is logarithmic.

    Arguments:
        lines: the lines of one level (`method_lines`).
    """
    levels = {line.level for line in lines}
    if len(levels) != 1:
        raise GatelensError("a figure of methods needs lines of one level: draw one figure per level.")
    level = levels.pop()
    ranked = [rank.method for rank in method_ranks(lines)]
    methods = list(dict.fromkeys([*ranked, *(line.method for line in lines)]))
    tasks = list(dict.fromkeys(line.task for line in lines))
    models = list(dict.fromkeys(line.model for line in lines))
    styles = colours(models)
    rows, columns = shape(len(tasks))
    size = (1.3 + 2.0 * max(columns, 2), 1.0 + rows * (0.6 + 0.22 * len(methods)))
    figure = NotebookFigure(figsize=size, layout="constrained")
    above = note(figure, _remark(lines))
    axes = panel_axes(above, len(tasks), sharey=True, sharex=True)
    most = max(line.total for line in lines)
    for axis, task in zip(axes, tasks, strict=True):
        log_axis(axis, "x", 0.8, 1.6 * most, power)
        axis.set_title(wrapped(task_title(task), 2.0))
        axis.grid(axis="x")
        for line in (line for line in lines if line.task == task):
            place = methods.index(line.method) + 0.6 * (models.index(line.model) - (len(models) - 1) / 2) / len(models)
            _draw(axis, line, place, styles[line.model][0])
    axes[0].set_yticks(range(len(methods)), [shown(method) for method in methods])
    axes[0].set_ylim(len(methods) - 0.5, -0.5)
    noun = LEVELS[level].noun
    above.supxlabel(f"{noun[0].upper()}{noun[1:]} needed for {lines[0].threshold:.0%} of the effect")
    handles = [
        Line2D([], [], color=styles[model][0], marker="o", markersize=4, linestyle="", label=shown(model))
        for model in models
    ]
    if any(line.count is None for line in lines):
        handles.append(Line2D([], [], color="0.4", marker="x", markersize=4, linestyle="", label="not reached"))
    above.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _draw(axis: Axes, line: MethodLine, place: float, colour: str) -> None:
    if line.count is None:
        axis.plot([line.total * 1.25], [place], "x", color=colour, markersize=4)
        return
    if line.count_low is not None:
        high = line.total if line.count_high is None else line.count_high
        axis.plot([max(line.count_low, 0.8), high], [place, place], color=colour, linewidth=1.0)
    axis.plot([max(line.count, 0.8)], [place], "o", color=colour, markersize=4)


def _remark(lines: Sequence[MethodLine]) -> str:
    prompts = sorted({line.prompts for line in lines if line.prompts is not None})
    numbers = " to ".join(str(n) for n in dict.fromkeys((prompts[0], prompts[-1]))) if prompts else "unknown numbers of"
    return f"Bars are 95 % intervals over prompts ({numbers} prompts). Methods are sorted by their mean rank."

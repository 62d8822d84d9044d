"""Figure of the empirical distribution of head roles: how many heads have at most a given score, for each kind."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from gatelens.errors import GatelensError
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.report.figures._roles import STYLES
from gatelens.report.figures._style import NotebookFigure, styled
from gatelens.report.figures._text import shown, task_title, wrapped


@styled
def role_distribution_figure(grid: Mapping[str, Mapping[str, HeadRoles]]) -> Figure:
    """The share of heads and seeds with at most a score, for each kind. A grey line marks 0.5.

    Each row of panels is a task, each column is a model. A panel without a result says so.

    Arguments:
        grid: the roles of each panel, ``grid[task][model]``.
    """
    models = list(dict.fromkeys(model for cells in grid.values() for model in cells))
    if not models:
        raise GatelensError("a figure of distributions needs the roles of at least one task and one model.")
    figure = NotebookFigure(figsize=(1.0 + 1.9 * max(len(models), 2), 0.9 + 1.5 * len(grid)), layout="constrained")
    axes = figure.subplots(len(grid), len(models), sharex=True, sharey=True, squeeze=False)
    for row, (task, cells) in zip(axes, grid.items(), strict=True):
        for axis, model in zip(row, models, strict=True):
            axis.grid()
            axis.axvline(0.5, color="0.7", linewidth=0.8)
            axis.set_xlim(0, 1)
            if model not in cells:
                axis.text(0.5, 0.5, "no result", transform=axis.transAxes, ha="center", va="center", color="0.5")
                continue
            for kind in KINDS:
                colour, line = STYLES[kind]
                axis.ecdf(cells[model].kind(kind).flatten().numpy(), linestyle=line, color=colour, label=kind)
        name = wrapped(task_title(task), 1.3)
        row[-1].annotate(name, (1.04, 0.5), xycoords="axes fraction", rotation=270, va="center", fontsize=9)
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(wrapped(shown(model), 1.7))
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines() if line.get_label() in KINDS}
    figure.legend([lines[kind] for kind in KINDS], KINDS, loc="outside upper center", ncols=len(KINDS))
    figure.supxlabel("Score of a Head")
    figure.supylabel("Share of Heads and Seeds\nwith at Most This Score", multialignment="center")
    return figure

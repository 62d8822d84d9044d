"""Figure of contrastive gates: the accuracy on each relation that was held out, in the way kept and in the way lost."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gatelens.errors import GatelensError
from gatelens.measures.relations_result import HeldOutRelation, RelationsResult
from gatelens.report.figures._style import BLUE, RED, NotebookFigure, panel_axes, styled
from gatelens.report.figures._text import shown, wrapped

_SIDES = {"keep": (BLUE, -0.12), "lose": (RED, 0.12)}  # colour, and place beside the name of the relation


@styled
def relations_figure(result: RelationsResult) -> Figure:
    """One panel for each way of asking that is kept; one pair of lines for each relation that was held out.

    A line leads from the accuracy with all gates open (ring) to the mean over seeds under the gates (dot), and a thin
    bar shows the range over seeds.
    """
    if not result.fits:
        raise GatelensError("a figure of relations needs at least one fit: the result has none.")
    by_way: dict[str, list[HeldOutRelation]] = {}
    for fit in result.fits:
        by_way.setdefault(fit.keep, []).append(fit)
    width = max(map(panel_width, by_way.values()))
    figure = NotebookFigure(figsize=(1.2 + width * len(by_way), 2.9), layout="constrained")
    figure.suptitle(wrapped(shown(f"{result.model}: accuracy on the relation that was held out"), 6.5, size=10))
    axes = panel_axes(figure, len(by_way), sharey=True)
    for axis, fits in zip(axes, by_way.values(), strict=True):
        draw_relations(axis, fits)
    axes[0].set_ylabel("response tokens predicted")
    handles = [
        Line2D([], [], color=BLUE, marker="o", markersize=4, label="way that is kept"),
        Line2D([], [], color=RED, marker="o", markersize=4, label="way that is lost"),
        Line2D([], [], color="0.4", marker="o", markersize=4, markerfacecolor="white", label="all gates open"),
    ]
    if result.settings.seeds > 1:
        handles.append(Line2D([], [], color="0.4", linewidth=3, alpha=0.3, label="from the lowest to the highest seed"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def panel_width(fits: Sequence[HeldOutRelation]) -> float:
    """The width in inches of a panel with these fits."""
    return max(1.8, 0.6 + 0.5 * len(fits))


def draw_relations(axis: Axes, fits: Sequence[HeldOutRelation]) -> None:
    """One panel: the fits that keep the same way of asking."""
    axis.set_title(wrapped(shown(f"keep {fits[0].keep}, lose {fits[0].lose}"), panel_width(fits) - 0.2))
    axis.set_xticks(range(len(fits)), [shown(fit.relation) for fit in fits], rotation=35, ha="right")
    axis.set_ylim(-0.03, 1.03)
    axis.grid(axis="y")
    for place, fit in enumerate(fits):
        _draw(axis, place, fit)


def _draw(axis: Axes, place: int, fit: HeldOutRelation) -> None:
    for side, (colour, offset) in _SIDES.items():
        gated, opened = getattr(fit.accuracy, side), getattr(fit.accuracy, f"{side}_open")
        x = place + offset
        axis.plot([x, x], [opened, float(gated.mean())], color=colour)
        axis.plot([x], [opened], "o", color=colour, markerfacecolor="white", markersize=4)
        axis.plot([x, x], [float(gated.min()), float(gated.max())], color=colour, linewidth=3, alpha=0.3)
        axis.plot([x], [float(gated.mean())], "o", color=colour, markersize=4, label=f"_{fit.relation} {side}")

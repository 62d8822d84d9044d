"""Figures of head roles: heat maps over layers and heads, and what becomes of the response when heads are ablated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from gatelens.ablation import AblationCurve

# Told apart by people who do not see all colours (Okabe and Ito), and by their lines.
STYLES = {
    "facilitation": ("#0072B2", "-"),
    "irrelevance": ("#009E73", "--"),
    "interference": ("#D55E00", "-."),
    "random": ("#999999", ":"),
}


def head_maps(maps: Mapping[str, Tensor], title: str = "") -> Figure:
    """One heat map (layer x head) for each named score in 0..1."""
    layers, heads = next(iter(maps.values())).shape
    figure = Figure(
        figsize=(1.2 + 0.28 * heads * len(maps) + 0.9 * len(maps), 1.2 + 0.16 * layers), layout="constrained"
    )
    axes = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for axis, (name, scores) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(scores.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        axis.set_title(name)
        axis.set_xlabel("head")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(axes), label="score, mean over seeds")
    figure.suptitle(title)
    return figure


def ablation_figure(grid: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> Figure:
    """Change in log-probability against ablated heads: grid[task][model] is a panel of curves with bands.

    Rows are tasks and share their y scale, columns are models.
    """
    tasks, models = list(grid), list(next(iter(grid.values())))
    figure = Figure(figsize=(1.5 + 2.8 * len(models), 0.9 + 2.3 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), len(models), sharex=True, sharey="row", squeeze=False)
    for row, task in zip(axes, tasks, strict=True):
        for axis, model in zip(row, models, strict=True):
            _draw(axis, grid[task][model])
        row[-1].annotate(task, (1.04, 0.5), xycoords="axes fraction", rotation=270, va="center")
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(model)
    axes[-1][-1].legend(frameon=False, fontsize="small")
    figure.supxlabel("number of ablated heads", fontsize="medium")
    figure.supylabel("change in log-probability\nof the target response", fontsize="medium", multialignment="center")
    return figure


def _draw(axis: Axes, curves: Sequence[AblationCurve]) -> None:
    axis.axhline(0, color="0.8", linewidth=0.8)
    for curve in curves:
        color, line = STYLES[curve.kind]
        x = curve.ablated.numpy()
        axis.plot(x, curve.change.numpy(), line, color=color, label=curve.kind, linewidth=1.5)
        axis.fill_between(x, curve.low.numpy(), curve.high.numpy(), color=color, alpha=0.2, linewidth=0)
    axis.grid(alpha=0.2)


def save_figure(figure: Figure, path: Path) -> None:
    """Write PNG, SVG and PDF beside each other."""
    for suffix in (".png", ".svg", ".pdf"):
        figure.savefig(path.with_suffix(suffix), dpi=200)

"""Figures of head roles: heat maps over layers and heads, and the change of the response when heads are ablated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.measures.ablation import AblationCurve
from gatelens.report.figures._style import BLUE, GREEN, GREY, RED, THIN, NotebookFigure, panel_axes, shape, styled
from gatelens.report.figures._text import shown, task_title, wrapped

# The kinds differ by line style as well as by colour.
STYLES = {
    "facilitation": (BLUE, "-"),
    "irrelevance": (GREEN, "--"),
    "interference": (RED, "-."),
    "random": (GREY, "-"),
}


@styled
def head_maps(maps: Mapping[str, Tensor], title: str = "", label: str = "mean score") -> Figure:
    """One heat map over layers and heads for each named score. All maps have the same scale.

    If all scores are in 0..1, colours go from dark to bright (viridis). Otherwise scores are signed: blue above 0, red
    below 0, white at 0, and the scale is symmetric. A score that was not measured (nan) is grey.

    Arguments:
        maps: the scores, (layer, head), by name.
        label: what a score is, for the colour bar.
    """
    if not maps or any(scores.ndim != 2 for scores in maps.values()):
        shapes = ", ".join(str(tuple(scores.shape)) for scores in maps.values()) or "none"
        raise GatelensError(f"head maps need one or more tensors (layer, head), and the given shapes are: {shapes}.")
    values = {name: scores.detach().float().cpu().numpy() for name, scores in maps.items()}
    vmin, vmax, colours = map_colours(np.concatenate([scores.ravel() for scores in values.values()]))
    rows, columns = shape(len(maps))
    layers, heads = (max(scores.shape[i] for scores in values.values()) for i in (0, 1))
    width, height = max(1.6, 0.1 * heads + 0.5), max(1.5, 0.09 * layers + 0.6)
    across = 1.2 + width * columns
    titled = wrapped(shown(title), across - 0.2, size=11)
    down = 0.4 + height * rows + 0.2 * titled.count("\n")
    figure = NotebookFigure(figsize=(across, down), layout="constrained")
    figure.suptitle(titled)
    axes = panel_axes(figure, len(maps), sharey=True)
    for axis, (name, scores) in zip(axes, values.items(), strict=True):
        image = axis.imshow(
            scores, vmin=vmin, vmax=vmax, cmap=colours, aspect="auto", origin="lower", interpolation="nearest"
        )
        axis.set_title(wrapped(shown(name), width - 0.3))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.supxlabel("head")
    figure.supylabel("layer")
    figure.colorbar(image, ax=axes, label=shown(label), fraction=0.05, pad=0.02)
    return figure


@styled
def ablation_figure(grid: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> Figure:
    """Change in log-probability of the target response against the number of ablated heads, with bands over seeds.

    Each row of panels is a task and has one y scale; each column is a model. The random order is a thin grey line. A
    line becomes thin where some seed has no more heads of its kind to ablate; a dot then shows the change with only
    the heads of its kind ablated. A panel without a result says so.

    Arguments:
        grid: the curves of each panel, ``grid[task][model]``.
    """
    models = list(dict.fromkeys(model for cells in grid.values() for model in cells))
    if not models:
        raise GatelensError("an ablation figure needs the curves of at least one task and one model: none were given.")
    figure = NotebookFigure(figsize=(1.0 + 2.0 * max(len(models), 2), 0.9 + 1.6 * len(grid)), layout="constrained")
    axes = figure.subplots(len(grid), len(models), sharex=True, sharey="row", squeeze=False)
    all_curves = [curve for cells in grid.values() for curves in cells.values() for curve in curves]
    most = max(int(curve.ablated.max()) for curve in all_curves)
    axes[0][0].set_xlim(0, max(most, 1))
    for row, (task, cells) in zip(axes, grid.items(), strict=True):
        for axis, model in zip(row, models, strict=True):
            draw_ablation(axis, cells.get(model, ()))
        name = wrapped(task_title(task), 1.3)
        row[-1].annotate(name, (1.04, 0.5), xycoords="axes fraction", rotation=270, va="center", fontsize=9)
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(wrapped(shown(model), 1.7))
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines() if line.get_label() in STYLES}
    kinds = [kind for kind in STYLES if kind in lines]
    figure.legend([lines[kind] for kind in kinds], kinds, loc="outside upper center", ncols=len(kinds))
    thin = [curve for curve in all_curves if _points_of_kind(curve) < len(curve.ablated)]
    dot = "; dot: only the heads of this kind" if any(curve.own is not None for curve in thin) else ""
    figure.supxlabel("Number of Ablated Heads" + (f"\n(thin: also heads of other kinds{dot})" if thin else ""))
    figure.supylabel("Change in Log-Probability\nof the Target Response", multialignment="center")
    return figure


def draw_ablation(axis: Axes, curves: Sequence[AblationCurve]) -> None:
    axis.grid()
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.axhline(0, color="0.7", linewidth=0.8)
    for curve in curves:
        colour, line = STYLES[curve.kind]
        x = curve.ablated.numpy()
        y = curve.change.numpy()
        if curve.kind == "random":
            axis.plot(x, y, line, color=colour, label=curve.kind, linewidth=THIN, zorder=1.5)
            continue
        end = _points_of_kind(curve)
        axis.plot(x[:end], y[:end], line, color=colour, label=curve.kind)
        if end < len(x):
            axis.plot(x[end - 1 :], y[end - 1 :], line, color=colour, label=f"_past {curve.kind}", linewidth=THIN)
            if curve.own is not None:  # (seed,): each seed has its own number of heads
                own_heads = curve.heads.clamp(max=x[-1]).float().mean()
                axis.plot([own_heads], [curve.own.mean()], "o", color=colour, label=f"_own {curve.kind}", markersize=4)
        axis.fill_between(x, curve.low.numpy(), curve.high.numpy(), color=colour, alpha=0.2, linewidth=0)
    if not curves:
        axis.text(0.5, 0.5, "no result", transform=axis.transAxes, ha="center", va="center", color="0.5")


def _points_of_kind(curve: AblationCurve) -> int:
    """How many points, from the first on, ablate only heads of the curve's kind in every seed."""
    return int((curve.of_kind >= curve.ablated).sum())


def map_colours(values: np.ndarray) -> tuple[float, float, matplotlib.colors.Colormap]:
    """The lowest and highest value of the scale, and its colour map."""
    known = values[np.isfinite(values)]
    inside = len(known) == 0 or (known.min() >= 0 and known.max() <= 1)
    if inside:
        return 0.0, 1.0, matplotlib.colormaps["viridis"].with_extremes(bad="0.8")
    far = float(np.abs(known).max())
    return -far, far, matplotlib.colormaps["RdBu"].with_extremes(bad="0.8")

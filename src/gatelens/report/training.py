"""What sparse post-training did: loss and open edges by step, by layer and head, and against each other.

Rows are those of a run's ``log.csv`` and ``judged.csv``, as dictionaries of numbers or of the text they were read from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.report.style import BLACK, BLUE, GREY, colours, log_axis, shown, styled

Rows = Sequence[Mapping[str, float | str]]
_MARKERS = "osD^vP*X"


@styled
def training_figure(log: Rows, judged: Rows = (), target: float | None = None, title: str = "") -> Figure:
    """Above: nats per token over the dense model, and KL. Below: open edges, %. Both against steps.

    log: the training text's, with drawn gates: the loss that is held to the target (dashed), and open edges.
    judged: of each held-out text, with gates as they are in use.
    """
    if not log:
        raise GatelensError("a training figure needs at least one row of log.csv.")
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = _column(log, "step")
    above.axhline(0, color="0.8", linewidth=0.8)
    above.plot(steps, _column(log, "constrained"), color=GREY, linewidth=0.8, label="training text: constrained loss")
    below.plot(steps, _percent(_column(log, "open")), color=GREY, linewidth=0.8, label="training text")
    if target is not None:
        above.axhline(target, linestyle="--", color=BLACK, linewidth=0.9, label=f"target {target:g}")
    texts = _texts(judged)
    for name, (colour, _) in colours(texts).items():
        rows = _judged_on(name, judged)
        where = _column(rows, "step")
        marks = {"color": colour, "marker": "o", "markersize": 3}
        above.plot(where, _column(rows, f"{name} above dense"), **marks, label=f"{shown(name)}: above dense")
        above.plot(where, _column(rows, f"{name} kl"), **marks, linestyle=":", label=f"{shown(name)}: KL")
        below.plot(where, _percent(_column(rows, f"{name} open")), **marks, label=shown(name))
    above.set_ylabel("nats per token")
    below.set(ylabel="open edges, %", xlabel="step")
    _percent_axis(below, "y", [value for line in below.get_lines() for value in line.get_ydata()])
    below.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    for axis in (above, below):
        axis.grid()
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.suptitle(shown(title))
    return figure


@styled
def loss_against_open_figure(stages: Mapping[str, Rows], title: str = "") -> Figure:
    """What sparsity costs: nats per token above dense against open edges, % on a log scale; a line for each text.

    stages: the rows of ``judged.csv`` of one or several stages of training, by name; a stage has its own mark.
    """
    texts = list(dict.fromkeys(name for rows in stages.values() for name in _texts(rows)))
    if not texts:
        raise GatelensError("no row of judged.csv: the loss against open edges needs a run that judged some text.")
    figure = Figure(figsize=(5.4, 3.0), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="0.6", linewidth=0.8, linestyle="--", label="dense")
    every: list[float] = []
    for name, (colour, line) in colours(texts).items():
        has = [(stage, _judged_on(name, rows)) for stage, rows in stages.items() if name in _texts(rows)]
        opened = [_percent(_column(rows, f"{name} open")) for _, rows in has]
        losses = [_column(rows, f"{name} above dense") for _, rows in has]
        axis.plot(list(chain(*opened)), list(chain(*losses)), line, color=colour, label=shown(name))
        for (stage, _), x, y in zip(has, opened, losses, strict=True):
            axis.plot(x, y, _marker(stages, stage), color=colour, markersize=4, label=f"_{stage}")
        every.extend(chain(*opened))
    if len(stages) > 1:
        for stage in stages:
            axis.plot([], [], _marker(stages, stage), color="0.4", markersize=4, label=shown(stage))
    _percent_axis(axis, "x", every)
    axis.set(xlabel="open edges, %", ylabel="loss above dense, nats per token")
    axis.grid()
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    axis.set_title(shown(title))
    return figure


@styled
def open_edges_figure(opened: Tensor, title: str = "") -> Figure:
    """Share of open edges, 0..1, of each head (layer, head) on a log scale, and of each layer (mean of its heads).

    A head without any open edge is grey.
    """
    if opened.ndim != 2:
        raise GatelensError(f"open edges are drawn of a tensor (layer, head), not of shape {tuple(opened.shape)}.")
    values = 100 * opened.detach().float().cpu().numpy()
    some = values[values > 0]
    low = 10 ** np.floor(np.log10(some.min())) if len(some) else 0.01
    low = float(max(low, 1e-4)) if low < 100 else 10.0
    layers, heads = values.shape
    figure = Figure(figsize=(2.9 + max(1.8, 0.13 * heads), max(2.0, 0.11 * layers + 0.8)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[max(1.8, 0.13 * heads), 1.3])
    image = left.imshow(
        np.ma.masked_where(values <= 0, values),
        norm=LogNorm(low, 100),
        cmap=matplotlib.colormaps["viridis"].with_extremes(bad="0.85", under="0.85"),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
    )
    right.barh(range(layers), values.mean(1), color=BLUE, height=0.7)
    right.set_xlim(0, 1.05 * float(values.mean(1).max()) or 1.0)
    left.set(xlabel="head", ylabel="layer")
    right.set_xlabel("mean of the layer, %")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    right.xaxis.set_major_locator(MaxNLocator(3))
    bar = figure.colorbar(image, ax=left, label="open edges, %", pad=0.02)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.suptitle(shown(title))
    return figure


def _texts(judged: Rows) -> list[str]:
    """The texts that were judged, in the order of their columns."""
    return list(dict.fromkeys(key.removesuffix(" open") for row in judged for key in row if key.endswith(" open")))


def _judged_on(text: str, judged: Rows) -> Rows:
    """The rows that have a text: a run that was continued may have got it late, or lost it."""
    return [row for row in judged if f"{text} open" in row]


def _column(rows: Rows, name: str) -> list[float]:
    try:
        return [float(row[name]) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise GatelensError(f"a row of the training log has no number '{name}': the file is damaged.") from error


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _percent_axis(axis: Axes, which: str, values: Sequence[float]) -> None:
    """A log scale around what there is, at least a decade long."""
    known = [value for value in values if value > 0] or [100.0]
    low, high = min(known) / 1.3, max(known) * 1.3
    log_axis(axis, which, min(low, high / 20), high, "{:g}".format)


def _marker(stages: Mapping[str, Rows], stage: str) -> str:
    return _MARKERS[list(stages).index(stage) % len(_MARKERS)]

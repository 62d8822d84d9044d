"""How many attention edges of a sparse model are open, by layer and head."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.report.figures._style import BLUE, styled
from gatelens.report.figures._text import shown


@styled
def open_edges_figure(opened: Tensor, title: str = "") -> Figure:
    """The share of open edges of each head as a heat map with a log scale, and the mean of each layer as a bar.

    A head without an open edge is grey.

    Arguments:
        opened: the share of open edges, in 0..1, (layer, head).
    """
    if opened.ndim != 2:
        raise GatelensError(f"open edges are drawn from a tensor (layer, head), not from shape {tuple(opened.shape)}.")
    values = 100 * opened.detach().float().cpu().numpy()
    positive = values[values > 0]
    low = 10 ** np.floor(np.log10(positive.min())) if len(positive) else 0.01
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

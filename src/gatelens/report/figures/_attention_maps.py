"""The attention of chosen heads over the tokens of a prompt, for several models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.report.figures._style import RED, note, styled
from gatelens.report.figures._text import shown, shown_token, wrapped

Maps = Mapping[str, Mapping[str, Tensor]]  # [head][model] -> (query, key)
_MOST_LABELS = 64


@styled
def attention_maps(tokens: Sequence[str], maps: Maps, opened: Maps | None = None, title: str = "") -> Figure:
    """Attention weights over the tokens of a prompt. Each row of panels is a head, each column is a model.

    Arguments:
        tokens: the tokens of the prompt. They are shown as they are, with visible spaces and line ends.
        maps: the attention weights in 0..1, ``maps[head][model]`` is (query, key). A head does not need every model.
        opened: bool maps of the same form: the edges whose gate is open. Each of them gets a ring.
    """
    models = list(dict.fromkeys(model for row in maps.values() for model in row))
    if not models:
        raise GatelensError("attention maps need at least one head of one model: none were given.")
    for name, row in maps.items():
        for model, weights in row.items():
            if tuple(weights.shape) != (len(tokens), len(tokens)):
                raise GatelensError(
                    f"the attention of {name} in {model} has the shape {tuple(weights.shape)}, and the prompt has "
                    f"{len(tokens)} tokens: give a square map (query, key) over these tokens."
                )
    labels = [shown_token(token) for token in tokens]
    side = max(1.6, 0.13 * len(tokens))
    margin = 0.06 * max(map(len, labels), default=1)
    figure = Figure(
        figsize=(1.3 + margin + (side + 0.1) * len(models), 0.8 + margin + (side + 0.25) * len(maps)),
        layout="constrained",
    )
    above = (
        figure if opened is None else note(figure, "Rings: edges whose gate is open. ␣ is a space, ↵ is a line end.")
    )
    axes = above.subplots(len(maps), len(models), sharex=True, sharey=True, squeeze=False)
    for row, (name, cells) in zip(axes, maps.items(), strict=True):
        for axis, model in zip(row, models, strict=True):
            axis.set_title(wrapped(f"{shown(name)}, {shown(model)}", side, 8), fontsize=8)
            if model not in cells:
                axis.text(0.5, 0.5, "not given", transform=axis.transAxes, ha="center", va="center", color="0.5")
                continue
            image = draw_attention(axis, cells[model])
            if opened is not None and model in opened.get(name, {}):
                mark_open(axis, opened[name][model], side / len(tokens))
    for axis in (*axes[-1], *axes[:, 0]):
        label_tokens(axis, labels)
    above.supxlabel("key")
    above.supylabel("query")
    above.colorbar(image, ax=list(axes.flat), label="attention", fraction=0.04, pad=0.02)
    above.suptitle(shown(title))
    return figure


def draw_attention(axis: Axes, weights: Tensor) -> AxesImage:
    values = weights.detach().float().cpu().numpy()
    hidden = np.triu(np.ones(values.shape, dtype=bool), 1)  # keys after the query
    colours = matplotlib.colormaps["Blues"].with_extremes(bad="0.96")
    return axis.imshow(
        np.ma.masked_where(hidden, values), vmin=0, vmax=1, cmap=colours, aspect="equal", interpolation="nearest"
    )


def mark_open(axis: Axes, opened: Tensor, cell: float) -> None:
    """Draw a ring on each open edge. cell: the width of one edge in inches."""
    queries, keys = np.nonzero(opened.cpu().numpy())
    size = (0.55 * cell * 72) ** 2
    axis.scatter(keys, queries, s=size, facecolors="none", edgecolors=RED, linewidths=0.6, label="open")


def label_tokens(axis: Axes, labels: Sequence[str]) -> None:
    """Write the tokens as tick labels. In a long prompt only every second, third, ... token has a label."""
    every = -(-len(labels) // _MOST_LABELS)
    places = list(range(0, len(labels), every))
    names = [labels[place] for place in places]
    axis.set_xticks(places, names, rotation=90, fontsize=6)
    axis.set_yticks(places, names, fontsize=6)

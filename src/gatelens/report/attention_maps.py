"""Attention of chosen heads over the tokens of a prompt, one model beside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.report.style import RED, note, shown, shown_token, styled, wrapped

Maps = Mapping[str, Mapping[str, Tensor]]  # [head][model] -> (query, key)
_MOST_LABELS = 64


@styled
def attention_maps(tokens: Sequence[str], maps: Maps, opened: Maps | None = None, title: str = "") -> Figure:
    """Attention weights in 0..1: ``maps[head][model]`` is (query, key). Rows are heads, columns are models.

    tokens: the prompt's, shown as they are, with spaces and line ends visible. opened: bool maps of the same form,
    where a model's gates are open; each open edge gets a mark. A head may lack a model.
    """
    models = list(dict.fromkeys(model for row in maps.values() for model in row))
    if not models:
        raise GatelensError("attention maps need at least one head of one model.")
    for name, row in maps.items():
        for model, weights in row.items():
            if tuple(weights.shape) != (len(tokens), len(tokens)):
                raise GatelensError(
                    f"the attention of {name} in {model} is {tuple(weights.shape)}, but there are {len(tokens)} "
                    "tokens: give a square map (query, key) over them."
                )
    labels = [shown_token(token) for token in tokens]
    side = max(1.6, 0.13 * len(tokens))
    margin = 0.06 * max(map(len, labels), default=1)
    figure = Figure(
        figsize=(1.3 + margin + (side + 0.1) * len(models), 0.8 + margin + (side + 0.25) * len(maps)),
        layout="constrained",
    )
    above = figure if opened is None else note(figure, "Ringed: edges whose gate is open. ␣ is a space, ↵ a line end.")
    axes = above.subplots(len(maps), len(models), sharex=True, sharey=True, squeeze=False)
    for row, (name, cells) in zip(axes, maps.items(), strict=True):
        for axis, model in zip(row, models, strict=True):
            axis.set_title(wrapped(f"{shown(name)}, {shown(model)}", side, 8), fontsize=8)
            if model not in cells:
                axis.text(0.5, 0.5, "not given", transform=axis.transAxes, ha="center", va="center", color="0.5")
                continue
            image = _draw(axis, cells[model])
            if opened is not None and model in opened.get(name, {}):
                _mark(axis, opened[name][model], side / len(tokens))
    for axis in (*axes[-1], *axes[:, 0]):
        _label(axis, labels)
    above.supxlabel("key")
    above.supylabel("query")
    above.colorbar(image, ax=list(axes.flat), label="attention", fraction=0.04, pad=0.02)
    above.suptitle(shown(title))
    return figure


def _draw(axis: Axes, weights: Tensor) -> AxesImage:
    values = weights.detach().float().cpu().numpy()
    hidden = np.triu(np.ones(values.shape, dtype=bool), 1)  # keys after the query
    colours = matplotlib.colormaps["Blues"].with_extremes(bad="0.96")
    return axis.imshow(
        np.ma.masked_where(hidden, values), vmin=0, vmax=1, cmap=colours, aspect="equal", interpolation="nearest"
    )


def _mark(axis: Axes, opened: Tensor, cell: float) -> None:
    """A ring on each open edge; cell: inches that one takes."""
    queries, keys = np.nonzero(opened.cpu().numpy())
    size = (0.55 * cell * 72) ** 2
    axis.scatter(keys, queries, s=size, facecolors="none", edgecolors=RED, linewidths=0.6, label="open")


def _label(axis: Axes, labels: Sequence[str]) -> None:
    """Tokens as tick labels; of a long prompt every second, third, ..."""
    every = -(-len(labels) // _MOST_LABELS)
    places = list(range(0, len(labels), every))
    names = [labels[place] for place in places]
    axis.set_xticks(places, names, rotation=90, fontsize=6)
    axis.set_yticks(places, names, fontsize=6)

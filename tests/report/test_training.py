"""Figures of sparse post-training show what the logs say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from text_boxes import faults, words

from gatelens.errors import GatelensError
from gatelens.report.figures import frontier_figure, open_edges_figure, training_figure

LOG = [{"step": i, "loss": 0.1 / i, "open": 0.5 / i} for i in (1, 2, 4)]


def judged(*rows: tuple[int, float, float]) -> list[dict[str, float]]:
    texts = ("wiki", "tales of $x$")
    return [
        {"step": step}
        | {f"{name} above dense": loss + i for i, name in enumerate(texts)}
        | {f"{name} kl": loss + 0.1 for name in texts}
        | {f"{name} open": share for name in texts}
        | {f"{name} keys per query": 100 * share for name in texts}
        for step, loss, share in rows
    ]


def lines(axis: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axis.get_lines()}


def test_training_curves_are_those_of_the_logs() -> None:
    figure = training_figure(LOG, judged((2, 0.02, 0.2), (4, 0.01, 0.04)), 0.06, "a run")
    above, below = figure.axes
    losses, shares = lines(above), lines(below)
    assert list(losses["training text: loss"].get_ydata()) == [0.1, 0.05, 0.025]
    assert list(losses["wiki: above dense"].get_xdata()) == [2, 4]
    assert list(losses["wiki: above dense"].get_ydata()) == [0.02, 0.01]
    assert list(losses["tales of $x$: above dense"].get_ydata()) == [1.02, 1.01]
    assert list(losses["wiki: KL"].get_ydata()) == pytest.approx([0.12, 0.11])
    assert list(losses["target 0.06"].get_ydata()) == [0.06, 0.06]
    assert list(shares["training text"].get_ydata()) == [50, 25, 12.5]
    assert list(shares["wiki"].get_ydata()) == [20, 4]
    assert below.get_yscale() == "log"
    assert {"a run", "nats per token", "open edges, %", "step", "tales of $x$"} <= set(words(figure))
    assert faults(figure) == []
    assert not any(text.get_parse_math() for text in above.get_legend().get_texts())


def test_rows_may_be_text_as_read_from_a_file() -> None:
    rows = [{key: str(value) for key, value in row.items()} for row in LOG]
    figure = training_figure(rows)
    assert list(lines(figure.axes[1])["training text"].get_ydata()) == [50, 25, 12.5]
    assert "target" not in " ".join(words(figure))
    with pytest.raises(GatelensError, match="no number 'open'"):
        training_figure([{"step": "1", "loss": "2", "open": "half"}])
    with pytest.raises(GatelensError, match="at least one line"):
        training_figure([])


def test_the_frontier_has_a_line_for_each_run() -> None:
    runs = {"first": judged((80, 0.07, 0.1)), "second": judged((80, 0.02, 0.12), (160, 0.0, 0.01))}
    figure = frontier_figure(runs, "two runs")
    above, other, kl, _ = figure.axes
    second = lines(above)["second"]
    assert list(second.get_xdata()) == [12, 1]
    assert list(second.get_ydata()) == [0.02, 0.0]
    assert list(lines(other)["second"].get_ydata()) == [1.02, 1.0]
    assert [list(line.get_ydata()) for line in kl.get_lines()] == [pytest.approx([0.17]), pytest.approx([0.12, 0.1])]
    assert above.get_xscale() == "log"
    assert {"wiki", "tales of $x$", "first", "second", "two runs"} <= set(words(figure))
    assert faults(figure) == []
    with pytest.raises(GatelensError, match="no run has evaluated held-out text"):
        frontier_figure({"first": []})


def test_open_edges_by_head_and_by_layer() -> None:
    opened = torch.tensor([[0.5, 0.1], [0.0, 0.002], [0.02, 0.04]])
    figure = open_edges_figure(opened, "sparse")
    left, right = figure.axes[:2]
    drawn = left.images[0].get_array()
    assert drawn[0].tolist() == pytest.approx([50, 10])
    assert drawn.mask.tolist() == [[False, False], [True, False], [False, False]]  # none open: grey
    assert left.images[0].get_clim() == pytest.approx((0.1, 100))
    assert [bar.get_width() for bar in right.patches] == pytest.approx([30, 0.1, 3])
    assert [bar.get_y() + bar.get_height() / 2 for bar in right.patches] == pytest.approx([0, 1, 2])
    assert {"sparse", "layer", "head", "open edges, %"} <= set(words(figure))
    assert faults(figure) == []
    assert faults(open_edges_figure(torch.zeros(30, 9))) == []
    assert faults(open_edges_figure(torch.ones(2, 2))) == []
    with pytest.raises(GatelensError, match="layer, head"):
        open_edges_figure(torch.zeros(3))

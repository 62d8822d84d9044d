"""Figures have the panels, lines and texts that they should: structure, not pixels."""

from __future__ import annotations

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gatelens.ablation import AblationCurve
from gatelens.report.figures import STYLES, ablation_figure, head_maps


def curves(shift: float = 0.0) -> list[AblationCurve]:
    changes = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    return [AblationCurve(kind, torch.tensor([0, 1, 2]), changes + shift) for kind in STYLES]


def clipped_texts(figure: Figure) -> list[str]:
    """Texts that reach over the edge of the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ticks = {label for axis in figure.axes for label in (*axis.get_xticklabels(), *axis.get_yticklabels())}
    texts = figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_visible() and artist.get_text())
    # Tick labels beyond the axis limits exist but are not drawn.
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text not in ticks]
    width, height = figure.canvas.get_width_height()
    return [name for name, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]


@pytest.mark.parametrize(("n_tasks", "n_models"), [(1, 1), (3, 2), (2, 4)])
def test_the_ablation_figure_is_a_grid_of_tasks_and_models(n_tasks: int, n_models: int) -> None:
    grid = {f"task {t}": {f"model {m}": curves(t) for m in range(n_models)} for t in range(n_tasks)}
    figure = ablation_figure(grid)
    assert len(figure.axes) == n_tasks * n_models
    assert [axis.get_title() for axis in figure.axes[:n_models]] == [f"model {m}" for m in range(n_models)]
    first = figure.axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in first.get_lines()}
    assert lines["facilitation"] == [0.0, -2.0, -3.0]
    assert len([name for name in lines if name in STYLES]) == 4
    # One y scale along a row.
    assert len({axis.get_ylim() for axis in figure.axes[:n_models]}) == 1
    assert clipped_texts(figure) == []


def test_head_maps_show_each_score() -> None:
    maps = {"facilitation": torch.rand(5, 4), "interference": torch.rand(5, 4)}
    figure = head_maps(maps, "induction in stories260k")
    shown = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in shown] == list(maps)
    assert torch.equal(torch.tensor(shown[0].images[0].get_array()), maps["facilitation"])
    assert clipped_texts(figure) == []

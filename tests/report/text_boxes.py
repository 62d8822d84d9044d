"""Which texts a figure really draws, and where: for tests that none overlap and none are cut off."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def drawn_texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text that is drawn, with its box in pixels: tick labels out of sight exist, but are not."""
    drawn: list[Text] = []
    original = Text.draw

    def spy(self: Text, renderer: Any, *args: Any, **kwargs: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn.append(self)
        original(self, renderer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", spy)
        figure.draw_without_rendering()
    return [(text.get_text(), text.get_window_extent()) for text in drawn]


def faults(figure: Figure) -> list[str]:
    """Texts that reach over the edge of the figure, and pairs whose boxes overlap, by more than a pixel."""
    texts = drawn_texts(figure)
    width, height = figure.bbox.width, figure.bbox.height
    faulty = [
        f"{name!r} is cut off"
        for name, box in texts
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for (first, a), (second, b) in combinations(texts, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
            faulty.append(f"{first!r} overlaps {second!r}")
    return faulty


def words(figure: Figure) -> list[str]:
    """All texts of a figure."""
    return [text for text, _ in drawn_texts(figure)]

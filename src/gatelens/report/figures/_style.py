"""What all figures have in common: colours that everyone can tell apart, sizes, panels and axes."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from gatelens.report.figures._text import FONT, shown

# The palette of Okabe and Ito, which colour-blind readers can tell apart. Blue and orange are a pair, as are green and
# pink.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK)
LINES = ("-", "--", "-.", ":")  # after seven names, the colours are used again with another line style
THIN = 0.7  # the line width of a baseline

STYLE: dict[str, Any] = {
    "font.family": FONT,
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.titlesize": 10,
    "figure.labelsize": 9,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 1.4,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.parse_math": False,
    "text.usetex": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "gatelens",  # the same figure gives the same file
}

P = ParamSpec("P")


class NotebookFigure(Figure):
    """A figure that a notebook shows as an image, without pyplot and without magic commands."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(image, format="png", dpi=110, metadata={"Software": None})
        return image.getvalue()


T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it draws in the style of all figures, whatever the user's matplotlib settings are."""

    @functools.wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return draw_in_style


def colours(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a line style for each name, so that a name looks the same in all panels of a figure."""
    unique = list(dict.fromkeys(names))
    n = len(COLOURS)
    return {name: (COLOURS[i % n], LINES[i // n % len(LINES)]) for i, name in enumerate(unique)}


def panel_axes(figure: Figure | SubFigure, n: int, most: int = 4, **kwargs: Any) -> list[Axes]:
    """Add n panels in rows of at most ``most``. Returns their axes; places that are left over stay empty."""
    rows, columns = shape(n, most)
    axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for surplus in axes[n:]:
        surplus.remove()
    return axes[:n]


def shape(n: int, most: int = 4) -> tuple[int, int]:
    """How many rows and columns n panels take."""
    rows = -(-n // most)
    return rows, -(-n // rows)


def log_axis(
    axes: Axes, which: str, low: float, high: float, write: Callable[[float], str], times: Sequence[int] = (1,)
) -> None:
    """Give the axis ``which`` ("x" or "y") a log10 scale from low to high.

    Labels are at the powers of ten, and at other multiples of them if ``times`` says so.
    """
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low, high)
    axis = getattr(axes, f"{which}axis")
    labelled = [n * 10.0**power for power in range(-12, 13) for n in times]
    axis.set_major_locator(FixedLocator([value for value in labelled if low <= value <= high]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_formatter(NullFormatter())


def power(value: float) -> str:
    """A power of ten as plain text: 10³. matplotlib's own labels would need its formulas, which are switched off."""
    return "10" + f"{round(math.log10(value))}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def note(figure: Figure, text: str, size: float = 6.5) -> SubFigure:
    """Add a note in small print along the lower edge. Returns the part of the figure above it, for the panels."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(shown(text), max(20, int(width * 72 / (0.56 * size))))
    note_height = len(lines) * 1.25 * size / 72 + 0.08
    grid = figure.add_gridspec(2, 1, height_ratios=[height - note_height, note_height])
    above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    below.text(0.06 / width, 0.5, "\n".join(lines), size=size, color="0.35", ha="left", va="center")
    return above

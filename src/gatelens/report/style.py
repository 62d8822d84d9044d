"""What all figures have in common: colours that everyone can tell apart, text as data, and how figures are saved.

Names and tokens come from prompts, models and files: they are shown as they are. No ``$`` starts a formula, and what
cannot be seen or drawn (spaces at the front, line ends, control characters, letters the font lacks) is spelled out.
"""

from __future__ import annotations

import functools
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from gatelens.errors import GatelensError

# Okabe and Ito: told apart by people who do not see all colours. Blue and orange, green and pink go in pairs.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK)
LINES = ("-", "--", "-.", ":")  # past seven, colours come again with another line
FONT = "DejaVu Sans"  # comes with matplotlib, so a figure is the same everywhere
FORMATS = ("png", "svg", "pdf")

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
_UNDATED = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
_UNSEEN = {"\n": "↵", "\r": "␍", "\t": "⇥"}

_CAPITALS = {"ioi": "IOI", "aba": "ABA", "abb": "ABB"}

P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Draw in the style of all figures, whatever the user's own settings are."""

    @functools.wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return inside


def colours(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a line for each name, in their order; the same name is drawn alike in all panels of a figure."""
    unique = list(dict.fromkeys(names))
    n = len(COLOURS)
    return {name: (COLOURS[i % n], LINES[i // n % len(LINES)]) for i, name in enumerate(unique)}


def shown(text: str) -> str:
    """A name or a text in one visible line: line ends and tabs as signs, what cannot be drawn as ``\\u4f60``."""
    return "".join(_UNSEEN.get(letter) or (letter if _drawable(letter) else _spelled(letter)) for letter in text)


def shown_token(token: str) -> str:
    """A token: as :func:`shown`, with the spaces at its ends visible and an empty one as quotes."""
    inner = token.strip(" ")
    front = len(token) - len(token.lstrip(" "))
    back = len(token) - front - len(inner)
    return "␣" * front + shown(inner) + "␣" * back or '""'


def wrapped(text: str, inches: float, size: float = 9) -> str:
    """A text that is shown, in lines that stay within this width: names of models can be long."""
    return "\n".join(textwrap.wrap(text, max(8, int(inches * 72 / (0.65 * size)))))


def task_title(name: str) -> str:
    """A task's name as it is published: ``greater-than`` is "Greater Than", ``ioi-long`` "IOI Long".

    A name with capitals of its own stays as it is; of a file, the ending is left out.
    """
    stem = Path(name).stem if name.endswith((".jsonl", ".json")) else name
    if stem != stem.lower():
        return shown(stem)
    return shown(" ".join(_CAPITALS.get(word, word.capitalize()) for word in re.split(r"[-_\s]+", stem) if word))


def panel_axes(figure: Figure | SubFigure, n: int, most: int = 4, **kwargs: Any) -> list[Axes]:
    """n panels in rows of at most four, equally filled; surplus places stay empty."""
    rows, columns = shape(n, most)
    axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for surplus in axes[n:]:
        surplus.remove()
    return axes[:n]


def shape(n: int, most: int = 4) -> tuple[int, int]:
    """Rows and columns of n panels."""
    rows = -(-n // most)
    return rows, -(-n // rows)


def log_axis(axis: Axes, which: str, low: float, high: float, write: Callable[[float], str]) -> None:
    """A log10 scale from low to high with a label at each power of ten."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}lim")(low, high)
    ours = getattr(axis, f"{which}axis")
    ours.set_major_locator(FixedLocator([10.0**power for power in range(-12, 13) if low <= 10.0**power <= high]))
    ours.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    ours.set_minor_formatter(NullFormatter())


def power(value: float) -> str:
    """A power of ten as 10³, without the mathematics of matplotlib."""
    return "10" + f"{round(math.log10(value))}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def note(figure: Figure, text: str, size: float = 6.5) -> SubFigure:
    """A remark in small print along the lower edge. What is above it is returned, for the panels."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(shown(text), max(20, int(width * 72 / (0.54 * size))))
    room = len(lines) * 1.25 * size / 72 + 0.08
    grid = figure.add_gridspec(2, 1, height_ratios=[height - room, room])
    above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    below.text(0.06 / width, 0.5, "\n".join(lines), size=size, color="0.35", ha="left", va="center")
    return above


def save_figure(figure: Figure, path: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write PNG, SVG and PDF beside each other: ``path`` has no ending. All are written, or none.

    The files carry no date, so that the same figure gives the same files.
    """
    for kind in formats:
        if kind not in FORMATS:
            raise GatelensError(f"no figure format '{kind}': formats are {', '.join(FORMATS)}.")
    path = Path(path)
    path = path.with_suffix("") if path.suffix[1:] in FORMATS else path
    written: dict[Path, Path] = {}
    try:
        with matplotlib.rc_context(STYLE):
            for kind in formats:
                temporary = path.with_name(f"{path.name}.{os.getpid()}.{kind}.tmp")
                written[temporary] = path.with_name(f"{path.name}.{kind}")
                figure.savefig(temporary, format=kind, dpi=200, metadata=_UNDATED.get(kind))
        for temporary, final in written.items():
            temporary.replace(final)
    except OSError as error:
        raise GatelensError(f"cannot write the figure {path}: {error.strerror}. Give another folder.") from error
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)
    return list(written.values())


def _drawable(letter: str) -> bool:
    return letter.isprintable() and ord(letter) in _letters()


def _spelled(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode()


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())

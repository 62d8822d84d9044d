"""Write a figure to files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from gatelens.errors import GatelensError
from gatelens.report.figures._style import STYLE
from gatelens.runtime.files import replacing
from gatelens.runtime.settings import unknown_name

FORMATS = ("png", "svg", "pdf")
DPI = 200  # of png files
_WITHOUT_DATE = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}


def save_figure(figure: Figure, path: str | Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write a figure in one or several formats. If one of them cannot be written, none is.

    The files hold no date, so the same figure always gives the same bytes.

    Arguments:
        path: the file name without an extension. An extension of a figure format is removed.
        formats: some of ``png``, ``svg`` and ``pdf``.

    Returns:
        The written files, in the order of the formats.
    """
    check_formats(formats)
    path = Path(path)
    path = path.with_suffix("") if path.suffix[1:] in FORMATS else path
    files = [path.with_name(f"{path.name}.{kind}") for kind in formats]
    try:
        with matplotlib.rc_context(STYLE), ExitStack() as replacements:
            # All files are drawn before the first one replaces an older file.
            temporaries = [replacements.enter_context(replacing(file)) for file in files]
            for temporary, kind in zip(temporaries, formats, strict=True):
                figure.savefig(temporary, format=kind, dpi=DPI, metadata=_WITHOUT_DATE[kind])
    except OSError as error:
        raise GatelensError(f"cannot write the figure {path} ({error.strerror}): give another folder.") from error
    return files


def lay_out(figure: Figure) -> None:
    """Compute the layout of a figure once, so that `save_figure` does not compute it again for every format.

    It is computed in the style and at the resolution of the files: both decide how wide texts are, and which ticks fit.
    """
    figure.set_dpi(DPI)
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
    figure.set_layout_engine("none")


def check_formats(formats: Sequence[str]) -> None:
    """Raise an error if a name is not a figure format."""
    for name in formats:
        if name not in FORMATS:
            raise GatelensError(unknown_name("figure format", name, FORMATS))

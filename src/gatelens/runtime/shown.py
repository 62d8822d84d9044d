"""What all results have in common: a figure, a table for a notebook, and a pandas table.

A result says what its records are (`records`), how it is headed (`headline`) and what draws it (`drawn_by`). The
figures are in `gatelens.report.plots`, which is imported when the first one is drawn.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gatelens.errors import GatelensError
from gatelens.runtime.late import late

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 20  # records that a notebook shows
_CELL = "text-align:left;vertical-align:top;padding:0.15em 0.7em;white-space:pre-wrap"


class Shown:
    """A result that can be plotted, shown in a notebook, and read as a table."""

    drawn_by: ClassVar[str] = ""  # what draws it, as ``module:function``

    def records(self) -> list[dict[str, Any]]:
        """The result as a table: one mapping of column -> value for each line."""
        raise NotImplementedError

    def headline(self) -> str:
        """The result in one line of plain text."""
        return type(self).__name__

    def plot(self, ax: Axes | None = None, **options: Any) -> Figure:
        """Draw the result.

        Arguments:
            ax: a matplotlib axis to draw on; by default a new figure is made.
            options: what the figure of this result takes; `gatelens.report.plots` describes it.

        Returns:
            The matplotlib figure. A notebook shows it if it is the last value of a cell; ``figure.savefig`` saves it.
        """
        figure: Figure = late(self.drawn_by)(self, ax=ax, **options)
        return figure

    def to_pandas(self) -> Any:
        """The result as a pandas table (`records`). pandas has to be installed."""
        try:
            import pandas
        except ImportError as error:
            raise GatelensError("to_pandas needs pandas, which is not installed: pip install pandas.") from error
        return pandas.DataFrame(self.records())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.headline()})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the headline and the first records. All text is escaped."""
        return html_table(self.headline(), self.records())


def html_table(headline: str, records: Sequence[Mapping[str, Any]], most: int = _MOST) -> str:
    """A table as HTML. Text of prompts and files is data: it is escaped.

    Arguments:
        most: how many records are shown; the number of the others is given below the table.
    """
    columns = list(dict.fromkeys(column for record in records[:most] for column in record))
    parts = [f"<p><strong>{html.escape(headline)}</strong></p>"]
    if columns:
        head = "".join(f'<th style="{_CELL}">{html.escape(column)}</th>' for column in columns)
        lines = [
            "".join(f'<td style="{_CELL}">{html.escape(_text(record.get(column)))}</td>' for column in columns)
            for record in records[:most]
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if len(records) > most:
        parts.append(f"<p>and {len(records) - most:,} more: see to_pandas() or records()</p>")
    return "".join(parts)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

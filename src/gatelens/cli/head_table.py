"""The table of heads and what they do, as the command line prints it."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Column, Table

from gatelens.measures.head_table import HeadLine, HeadTable

# In a terminal of 80 columns the others are narrowed, and the words of these are not broken.
_WIDTHS = {"share": 5, "right,\nwrong": 6, "kind": 12}


def head_table(table: HeadTable) -> Table:
    """A line for each head; two if the table has the dense model too."""
    both = table.dense is not None
    names = [*(["model"] if both else []), "head", "score", "share", "looks at", "writes", "right,\nwrong", "kind"]
    columns = [Column(name, overflow="fold", width=_WIDTHS.get(name)) for name in names]
    shown = Table(
        *columns,
        title=f"{escape(table.task)} in {escape(table.model)}: what the best heads do",
        caption=_caption(table),
        show_lines=both,
    )
    for line in table.lines:
        if table.dense is not None:
            shown.add_row(escape(table.dense.model), *_cells(table.dense[line.head]))
        shown.add_row(*([escape(table.model)] if both else []), *_cells(line))
    return shown


def _cells(line: HeadLine) -> list[str]:
    looks = ", ".join(f"{role} {share:.0%}" for role, share in line.looks_at()) or "-"
    writes = " ".join(repr(token.replace(" ", "␣")) for token in line.writes)
    cells = [
        line.head,
        f"{line.score:+.2f} ({line.low:+.2f} to {line.high:+.2f})",
        f"{line.share:.0%}",
        looks,
        writes,
        f"{line.answer:+.1f},\n{line.wrong:+.1f}",
        ", ".join(line.kinds),
    ]
    return [escape(cell) for cell in cells]


def _caption(table: HeadTable) -> str:
    return (
        f"{table.prompts} prompts. score: fall of the {table.metric} without the head, with 95 % interval; share: of "
        f"the effect of all heads ({table.effect:+.2f}); looks at, writes: at the answer position; right, wrong: "
        "direct logits of the answers; kind: by probes."
    )

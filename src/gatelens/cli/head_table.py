"""The table of heads and what they do, as the command line prints it."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Column, Table

from gatelens.measures.head_table import HeadLine, HeadTable

# In a terminal of 80 columns the others are narrowed, and the words of these are not broken.
_WIDTHS = {"share": 5, "right,\nwrong": 6, "kind": 12}
_NOT_DESCRIBED = ("-",) * 6  # the run of the dense model describes other heads


def head_table(table: HeadTable) -> Table:
    """A line for each head, and below it a line for the same head of the dense model if the table has it."""
    names = ["head", "score", "share", "looks at", "writes", "right,\nwrong", "kind"]
    beside = "" if table.dense is None else f" (dense: {escape(table.dense.model)})"
    shown = Table(
        *(Column(name, overflow="fold", width=_WIDTHS.get(name)) for name in names),
        title=f"{escape(table.task)} in {escape(table.model)}{beside}: what the best heads do",
        caption=_caption(table),
    )
    for line in table.lines:
        shown.add_row(line.head, *_cells(line))
        if table.dense is not None:
            same_head = table.dense.line(line.head)
            shown.add_row("dense", *(_NOT_DESCRIBED if same_head is None else _cells(same_head)), style="dim")
            shown.add_section()
    return shown


def _cells(line: HeadLine) -> list[str]:
    looks = ", ".join(f"{role} {share:.0%}" for role, share in line.looks_at()) or "-"
    writes = " ".join(repr(token.replace(" ", "␣")) for token in line.writes)
    cells = [
        f"{line.score:+.2f} ({line.low:+.2f} to {line.high:+.2f})",
        f"{line.share:.0%}",
        looks,
        writes,
        f"{line.answer:+.1f},\n{line.wrong:+.1f}",
        ", ".join(line.kinds),
    ]
    return [escape(cell) for cell in cells]


def _caption(table: HeadTable) -> str:
    dense = " dense: the same head of the dense model." * (table.dense is not None)
    return (
        f"{table.prompts} prompts. score: fall of the {table.metric} without the head, with 95 % interval; share: of "
        f"the effect of all heads ({table.effect:+.2f}); looks at, writes: at the answer position; right, wrong: "
        "direct logits of the answers; kind: by probes."
        f"{dense}"
    )

"""Tables of measurements that are committed: a CSV file, and the same as Markdown with the processor's name."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gatelens.runtime.files import replace_file, write_csv


def write_table(path: Path, records: Sequence[Mapping[str, Any]], text: str) -> None:
    """Write ``path`` as CSV and beside it as Markdown.

    Arguments:
        records: the lines; all have the same keys, which are the columns.
        text: what the table shows and how it was measured, in Markdown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(records[0])
    write_csv(path, columns, [[record[name] for name in columns] for record in records])
    replace_file(path.with_suffix(".md"), f"{text}\n\n{markdown(records)}\n")


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as a Markdown table. Floats have four digits, what is None is empty."""
    columns = list(records[0]) if records else []
    lines = [columns, ["---"] * len(columns), *([_cell(record[name]) for name in columns] for record in records)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def processor() -> str:
    """The name of the processor, and how many cores the machine has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

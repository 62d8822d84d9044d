"""What a run measured, step by step: a CSV file that grows with every step, and JSON at the end."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from gatelens.runtime.files import read_numbers, replace_file

Row = dict[str, float]
FIELDS = (
    "step",
    "constrained",
    "kl",
    "cross_entropy",
    "above_dense",
    "expected_open",
    "open",
    "multiplier",
    "tokens_per_second",
)


class Log:
    """The rows of `log.csv`. A run that continues after `steps` steps forgets what was logged later.

    Columns that an earlier call wrote stay, also where this one has others: a row has no number for some of them.
    """

    def __init__(
        self, folder: Path | None, steps: int = 0, fields: tuple[str, ...] = FIELDS, name: str = "log"
    ) -> None:
        self.folder, self.name = folder, name
        before, rows = self._read()
        self.fields = tuple(dict.fromkeys((*before, *fields)))
        self.rows: list[Row] = [row for row in rows if row["step"] <= steps]
        if folder is not None:
            text = StringIO(newline="")
            csv.writer(text).writerows([self.fields, *map(self._cells, self.rows)])
            replace_file(self._path("csv"), text.getvalue())

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.folder is not None:
            with self._path("csv").open("a", newline="") as file:
                csv.writer(file).writerow(self._cells(row))

    def write_json(self) -> None:
        if self.folder is not None:
            replace_file(self._path("json"), json.dumps(self.rows, indent=1))

    def _read(self) -> tuple[Sequence[str], list[Row]]:
        """The columns and rows that are there."""
        if self.folder is None or not self._path("csv").exists():
            return (), []
        columns, rows = read_numbers(self._path("csv"))
        return columns, [row for row in rows if "step" in row]

    def _cells(self, row: Row) -> list[str]:
        return [_short(row[name]) if name in row else "" for name in self.fields]

    def _path(self, kind: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.name}.{kind}"


def _short(value: float) -> str:
    return f"{value:.6g}"

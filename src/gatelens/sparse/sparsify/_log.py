"""What a run measured, step by step: a CSV file that is complete after every step, and JSON at the end.

`gatelens report` draws these files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from gatelens.runtime.files import read_numbers, replace_file

Record = dict[str, float]
"""The numbers of one step, by the name of their column."""
MEASURED = (
    "loss",
    "kl",
    "cross_entropy",
    "above_dense",
    "expected_open",
    "open",
    "keys_per_query",
    "idle_heads",
)
"""What a step measures on its sequences."""
FIELDS = ("step", "length", *MEASURED, "multiplier", "tokens_per_second")


class Log:
    """The records of `log.csv`, or of another file with this name.

    Columns that an earlier process wrote stay, even if this one has others: a record has no number for some of them.

    Arguments:
        folder: the run folder; without one nothing is written.
        steps: records of later steps are removed, because the run resumes after this many steps.
    """

    def __init__(
        self, folder: Path | None, steps: int = 0, fields: tuple[str, ...] = FIELDS, name: str = "log"
    ) -> None:
        self.folder, self.name = folder, name
        before, records = self._read()
        self.fields = tuple(dict.fromkeys((*before, *fields)))
        self.records: list[Record] = [record for record in records if record["step"] <= steps]
        if folder is not None:
            text = StringIO(newline="")
            csv.writer(text).writerows([self.fields, *map(self._cells, self.records)])
            replace_file(self._path("csv"), text.getvalue())

    def add(self, record: Record) -> None:
        """Append a record to the file, with numbers of six digits.

        Records have the numbers that are read from the file when a run resumes, so that both end with the same log.
        """
        cells = self._cells(record)
        self.records.append({name: float(cell) for name, cell in zip(self.fields, cells, strict=True) if cell})
        if self.folder is not None:
            with self._path("csv").open("a", newline="") as file:
                csv.writer(file).writerow(cells)

    def write_json(self) -> None:
        """Write all records as JSON too."""
        if self.folder is not None:
            replace_file(self._path("json"), json.dumps(self.records, indent=1))

    def _read(self) -> tuple[Sequence[str], list[Record]]:
        """The columns and records of an earlier process."""
        if self.folder is None or not self._path("csv").exists():
            return (), []
        columns, records = read_numbers(self._path("csv"))
        return columns, [record for record in records if "step" in record]

    def _cells(self, record: Record) -> list[str]:
        return [f"{record[name]:.6g}" if name in record else "" for name in self.fields]

    def _path(self, suffix: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.name}.{suffix}"

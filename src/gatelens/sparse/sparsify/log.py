"""What a run measured, step by step: a CSV file that is there after every step, JSON and a plot at the end."""

from __future__ import annotations

import csv
import importlib.util
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


def plot(log: Log, judged: Log, target: float, path: Path) -> None:
    """Loss and open edges against steps, in one figure of two panels. Without matplotlib nothing is drawn."""
    if importlib.util.find_spec("matplotlib") is None or not log.rows:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [row["step"] for row in log.rows]
    above.plot(steps, [row["constrained"] for row in log.rows], lw=0.8, label="constrained loss, gates drawn")
    above.axhline(target, ls="--", color="black", lw=0.8, label="target")
    below.plot(steps, [100 * row["open"] for row in log.rows], lw=0.8, label="training text")
    for name in sorted({key.removesuffix(" open") for row in judged.rows for key in row if key.endswith(" open")}):
        rows = [row for row in judged.rows if f"{name} open" in row]
        where = [row["step"] for row in rows]
        above.plot(where, [row[f"{name} above dense"] for row in rows], "o-", ms=3, label=f"{name}, above dense")
        below.plot(where, [100 * row[f"{name} open"] for row in rows], "o-", ms=3, label=name)
    above.set_ylabel("nats per token")
    below.set(ylabel="open edges, %", xlabel="step", yscale="log")
    for axis in (above, below):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)

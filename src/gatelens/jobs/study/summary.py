"""What became of a study: one row for each cell, and how many times fewer gates the sparse models need."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gatelens.errors import GatelensError
from gatelens.jobs.study.cells import Cell
from gatelens.jobs.study.file import Study
from gatelens.jobs.study.folder import Outcome, StudyFolder
from gatelens.measures.circuit_result import CircuitResult, CircuitSettings, load_circuit, record_dense
from gatelens.measures.pairing import dense_circuit_of, multiplier_of
from gatelens.runtime.files import replacing, write_json

COLUMNS = (
    "cell", "status", "level", "method", "task", "model", "varied", "threshold",
    "count", "total", "multiplier", "seconds", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Multiplier:
    """Dense count / sparse count of one task at one level: above 1, the sparse model needs fewer gates."""

    cell: str  # of the sparse model
    task: str
    level: str
    dense: str
    sparse: str
    multiplier: float
    varied: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Outcomes of all cells of a study, in its order."""

    study: Study
    outcomes: dict[str, Outcome]
    report: Path | None = None  # the report's page, if there is one
    problems: tuple[str, ...] = ()  # with the report
    multipliers: tuple[Multiplier, ...] = ()

    @property
    def failed(self) -> int:
        return sum(outcome.status != "done" for outcome in self.outcomes.values())

    def rows(self) -> list[dict[str, Any]]:
        """One for each cell, keyed by `COLUMNS`; the multiplier stands in the sparse model's row."""
        by_cell = {compared.cell: compared.multiplier for compared in self.multipliers}
        return [
            _row(cell, self.outcomes[cell.name]) | {"multiplier": by_cell.get(cell.name)} for cell in self.study.cells
        ]

    def write(self, out: Path) -> None:
        """As ``summary.json`` and ``summary.csv``."""
        about = {
            "title": self.study.title,
            "done": len(self.outcomes) - self.failed,
            "failed": self.failed,
            "cells": self.rows(),
            "multipliers": [asdict(one) for one in self.multipliers],
        }
        write_json(out / "summary.json", about)
        with replacing(out / "summary.csv") as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({key: _plain(value) for key, value in row.items()} for row in self.rows())

    def table(self) -> Table:
        """For the terminal."""
        table = Table("cell", "status", "count", "of", "multiplier", "seconds", title=escape(self.study.title))
        for row in self.rows():
            style = "" if row["status"] == "done" else "red"
            count = "not reached" if row["status"] == "done" and row["count"] is None else _number(row["count"], ",.0f")
            times = _number(row["multiplier"], ".1f")
            total, seconds = _number(row["total"], ",d"), _number(row["seconds"], ",.0f")
            table.add_row(escape(row["cell"]), row["status"], count, total, times, seconds, style=style)
        return table

    def failures(self) -> list[str]:
        """A sentence for each cell that failed."""
        return [
            f"{name} failed: {outcome.reason}" for name, outcome in self.outcomes.items() if outcome.status != "done"
        ]


def multipliers(cells: Sequence[Cell], outcomes: Mapping[str, Outcome], folder: StudyFolder) -> tuple[Multiplier, ...]:
    """The multiplier of every cell that has a dense cell to compare with, from the saved circuits.

    The rule is that of the report (`gatelens.measures.pairing`). The dense model that the study file names is recorded
    in the saved circuits first, because it may have changed since they were computed.
    """
    circuits: dict[str, CircuitResult] = {}
    for cell in cells:
        if cell.kind == "circuit" and outcomes[cell.name].status == "done":
            with suppress(GatelensError):  # a damaged run is not compared; the report says what is wrong with it
                record_dense(folder.run_folder(cell), cell.model.dense)
                circuits[cell.name] = load_circuit(folder.run_folder(cell))
    compared: list[Multiplier] = []
    for cell in cells:
        if cell.name in circuits:
            sparse = circuits[cell.name]
            dense = dense_circuit_of(sparse, circuits.values())
            ratio = multiplier_of(dense, sparse)
            if dense is not None and ratio is not None:
                compared.append(
                    Multiplier(cell.name, cell.task, cell.level, dense.model, sparse.model, ratio, cell.varied)
                )
    return tuple(compared)


def _row(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    settings = cell.settings
    return {
        "cell": cell.name,
        "status": outcome.status,
        "level": cell.level,
        "method": settings.method if isinstance(settings, CircuitSettings) else "head gating",
        "task": cell.task,
        "model": cell.model.label,
        "varied": cell.varied,
        "threshold": settings.threshold if isinstance(settings, CircuitSettings) else None,
        "count": outcome.count,
        "total": outcome.total,
        "seconds": outcome.seconds,
        "reason": outcome.reason,
    }


def _key(varied: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(varied.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _key(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

"""The results of a study: one line for each cell, and how many times fewer gates the sparse models need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.markup import escape
from rich.table import Table

from gatelens.errors import GatelensError
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._folder import Outcome, Status, StudyFolder
from gatelens.jobs.study.file import Study
from gatelens.measures.areas import AreaColumns
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.counts import CountColumns, MultiplierColumns
from gatelens.measures.method_comparison import MethodLine, method_ranks
from gatelens.measures.pairing import dense_circuit_of, multiplier_of
from gatelens.measures.thresholds import ThresholdLine
from gatelens.runtime.files import write_csv, write_json
from gatelens.runtime.records import SCHEMA_VERSION, Record
from gatelens.runtime.settings import Settings


class CellSummary(CountColumns, MultiplierColumns, AreaColumns):
    """A line of ``summary.csv``, and an entry of ``cells`` in ``summary.json``."""

    cell: str
    status: Status
    level: str
    method: str
    task: str
    model: str
    varied: dict[str, Any]
    threshold: float | None
    total: int | None
    seconds: float | None
    reason: str | None


class Comparison(MultiplierColumns):
    """Dense count / sparse count of one task at one level. Above 1, the sparse model needs fewer gates."""

    task: str
    level: str
    dense: str
    sparse: str
    prompts: int | None = Field(default=None, description="prompts of the sparse model, for each task seed")
    seeds: int | None = Field(default=None, description="task seeds of the sparse model")
    shown: str = Field(default="-", description="the multiplier as it is printed, with interval and number of prompts")
    varied: dict[str, Any] = Field(default={})


class SummaryRecord(Record):
    """The schema of ``summary.json``."""

    title: str
    done: int = Field(description="number of cells that are done")
    failed: int = Field(description="number of cells that failed")
    waiting: int = Field(default=0, description="number of cells that were not asked for and are not done")
    cells: list[CellSummary]
    multipliers: list[Comparison]


@dataclass(frozen=True)
class Summary:
    """The outcomes of all cells of a study, in its order.

    Arguments:
        comparisons: the multiplier of each cell of a sparse model that can be compared, by the name of the cell.
        methods: a line for each circuit of a level at which the study has several methods.
        thresholds: a line for each sparse circuit and threshold.
        report: the page of the report, if there is one.
        problems: what went wrong with the summary or the report, one sentence each.
        folder: where the runs are.

    Example:
        summary = gatelens.run_study(gatelens.read_study("study.toml"), "runs/study")
        summary.failed, [circuit.count for circuit in summary.circuits()], summary.multipliers
    """

    study: Study  # the study
    outcomes: dict[str, Outcome]  # the state of every cell, by its name
    comparisons: dict[str, Comparison]
    methods: tuple[MethodLine, ...] = ()
    thresholds: tuple[ThresholdLine, ...] = ()
    report: Path | None = None
    problems: tuple[str, ...] = ()
    folder: StudyFolder | None = None

    @property
    def failed(self) -> int:
        """Number of cells that failed."""
        return self._with_status("failed")

    @property
    def done(self) -> int:
        """Number of cells that are done."""
        return self._with_status("done")

    @property
    def waiting(self) -> int:
        """Number of cells that were left for another command: ``only`` left them out."""
        return self._with_status("waiting")

    def _with_status(self, status: Status) -> int:
        return sum(outcome.status == status for outcome in self.outcomes.values())

    @property
    def multipliers(self) -> list[Comparison]:
        """All multipliers, in the order of the cells."""
        return list(self.comparisons.values())

    def circuits(self) -> list[CircuitResult]:
        """The circuits of all cells that are done, in the order of the cells."""
        if self.folder is None:
            return []
        return list(load_circuits(self.study.cells, self.outcomes, self.folder).values())

    def cells(self) -> list[CellSummary]:
        """One entry for each cell. A multiplier is in the entry of the sparse model."""
        return [
            _summarise(cell, self.outcomes[cell.name], self.comparisons.get(cell.name)) for cell in self.study.cells
        ]

    def write(self, out: Path) -> None:
        """Write ``summary.json`` and ``summary.csv``; and what can be compared: ``methods.csv``, ``thresholds.csv``."""
        cells = self.cells()
        record = SummaryRecord(
            schema_version=SCHEMA_VERSION,
            title=self.study.title,
            done=self.done,
            failed=self.failed,
            waiting=self.waiting,
            cells=cells,
            multipliers=self.multipliers,
        )
        write_json(out / "summary.json", record.model_dump(mode="json"))
        numbers = [
            *CountColumns.model_fields,
            *MultiplierColumns.model_fields,
            *AreaColumns.model_fields,
        ]  # after what they are about
        header = [*(name for name in CellSummary.model_fields if name not in numbers), *numbers]
        lines = ({**dict(cell), "varied": _in_words(cell.varied)} for cell in cells)
        write_csv(out / "summary.csv", header, ([line[name] for name in header] for line in lines))
        _write_lines(out / "methods.csv", self.methods)
        _write_lines(out / "thresholds.csv", self.thresholds)

    def methods_table(self) -> Table | None:
        """A table that compares methods, the best one of each level first; None if the study has one method only."""
        if not self.methods:
            return None
        caption = (
            "Rank: mean over tasks and models of the rank by gates needed, from 1; best: where no method needs fewer. "
            "Cost: forwards (F) of each prompt. Every count with its interval is in methods.csv."
        )
        table = Table("level", "method", "rank", "best", "cost", title="Methods compared", caption=caption)
        for rank in method_ranks(self.methods):
            cost = "-" if rank.cost is None else f"{rank.cost:,.1f} F"
            table.add_row(rank.level, escape(rank.method), f"{rank.rank:.1f}", f"{rank.best} of {rank.cells}", cost)
        return table

    def table(self) -> Table:
        """A table for the terminal."""
        caption = (
            "Counts and multipliers with their 95 % intervals over prompts; for those of CPR and CMD see summary.csv"
        )
        header = ("cell", "status", "count", "of", "multiplier", "CPR", "CMD", "seconds")
        table = Table(*header, title=escape(self.study.title), caption=caption)
        for cell in self.cells():
            comparison = self.comparisons.get(cell.cell)
            multiplier = "-" if comparison is None else escape(comparison.shown)
            table.add_row(
                escape(cell.cell),
                cell.status,
                self.outcomes[cell.cell].shown or "-",
                _number(cell.total, ",d"),
                multiplier if comparison is None or comparison.shows_difference else f"[dim]{multiplier}[/dim]",
                _number(cell.cpr, ".2f"),
                _number(cell.cmd, ".2f"),
                _number(cell.seconds, ",.0f"),
                style={"done": "", "waiting": "dim"}.get(cell.status, "red"),
            )
        return table

    def failures(self) -> list[str]:
        """A sentence for each cell that failed."""
        return [
            f"{name} failed: {outcome.reason}" for name, outcome in self.outcomes.items() if outcome.status == "failed"
        ]


def load_circuits(
    cells: Sequence[Cell], outcomes: Mapping[str, Outcome], folder: StudyFolder
) -> dict[str, CircuitResult]:
    """The saved circuits of all cells that are done, by the name of the cell."""
    circuits: dict[str, CircuitResult] = {}
    for cell in cells:
        if cell.job.load is not None and outcomes[cell.name].status == "done":
            with suppress(GatelensError):  # a damaged run is not compared; the report says what is wrong with it
                circuits[cell.name] = cell.job.load(folder.run_folder(cell), cell.model.dense)
    return circuits


def compare(cells: Sequence[Cell], circuits: Mapping[str, CircuitResult]) -> dict[str, Comparison]:
    """The multiplier of every sparse cell whose dense cell is known and done, by the name of the sparse cell.

    The rule is that of the report (`gatelens.measures.pairing`), and both read the saved circuits.
    """
    comparisons: dict[str, Comparison] = {}
    for cell in cells:
        if cell.name not in circuits:
            continue
        sparse = circuits[cell.name]
        dense = dense_circuit_of(sparse, circuits.values())
        ratio = multiplier_of(dense, sparse)
        if dense is not None and ratio is not None:
            comparisons[cell.name] = Comparison(
                task=cell.task,
                level=cell.level,
                dense=dense.model,
                sparse=sparse.model,
                prompts=sparse.curve.sample.prompts,
                seeds=sparse.curve.sample.seeds,
                shown=str(ratio),
                varied=cell.varied,
                **dict(ratio.columns()),
            )
    return comparisons


def _summarise(cell: Cell, outcome: Outcome, comparison: Comparison | None) -> CellSummary:
    measured = (*CountColumns.model_fields, *AreaColumns.model_fields)
    counts = {name: getattr(outcome, name) for name in measured}
    multipliers = {name: getattr(comparison, name, None) for name in MultiplierColumns.model_fields}
    columns: dict[str, Any] = {**cell.job.columns(cell.settings), **counts, **multipliers}
    return CellSummary(
        cell=cell.name,
        status=outcome.status,
        level=cell.level,
        task=cell.task,
        model=cell.model.label,
        varied=cell.varied,
        total=outcome.total,
        seconds=outcome.seconds,
        reason=outcome.reason,
        **columns,
    )


def _write_lines(path: Path, lines: Sequence[Settings]) -> None:
    """Write lines of one type as CSV; without a line there is no file."""
    if lines:
        columns = list(type(lines[0]).model_fields)
        write_csv(path, columns, ([getattr(line, name) for name in columns] for line in lines))


def _in_words(varied: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(varied.items()))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

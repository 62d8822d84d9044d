"""The folder of a study: what was asked, the state of each cell, and which process works on it.

study.json            what was asked; a study may grow, but nothing in it may change
cells/NAME/           the run folder of a cell, as `gatelens circuit` and `gatelens gate` write it
state/NAME.json       the state of the cell, with the fingerprint of what was run
state/NAME.lock       held by the process that works on the cell; released when that process ends
outdated/NAME-HASH/   an earlier run of a cell, from before its model, its task's file or the code changed
summary.json, .csv    the results of all cells, and the multipliers
report/               the report
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import Field

from gatelens.errors import GatelensError
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study.file import Study
from gatelens.measures.areas import AreaColumns
from gatelens.measures.counts import CountColumns
from gatelens.measures.head_table import HEADS_FILE
from gatelens.runtime.files import make_folder, write_json, writing
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.run_folder import RESULT, is_finished, is_marked

Status = Literal["waiting", "running", "done", "failed"]


class Outcome(CountColumns, AreaColumns, Record):
    """The state of a cell: the schema of ``state/NAME.json``."""

    name: str
    status: Status = "waiting"
    fingerprint: str = ""
    shown: str | None = Field(None, description="the count as it is printed, with its interval and number of prompts")
    total: int | None = Field(None, description="number of gates")
    sparse: bool | None = Field(None, description="whether the model's attention is gated")
    seconds: float | None = None
    reason: str | None = Field(None, description="why the cell failed, in one sentence")
    trace: str | None = Field(None, description="the traceback of an unexpected error")
    process: int | None = Field(None, description="the last process that worked on the cell")
    ended: float | None = Field(None, description="when it ended, in seconds since 1970")

    @classmethod
    def new(cls, name: str, status: Status = "waiting", **values: Any) -> Outcome:
        """An outcome in the schema that this version writes."""
        return cls(schema_version=SCHEMA_VERSION, name=name, status=status, **values)


class StudyRecord(Record):
    """The schema of ``study.json``: what was asked."""

    title: str
    models: dict[str, dict[str, Any]] = Field(description="what identifies each model, by its label")
    cells: dict[str, dict[str, Any]] = Field(description="what identifies each cell, by its name")

    @classmethod
    def of(cls, study: Study) -> StudyRecord:
        return cls(
            schema_version=SCHEMA_VERSION,
            title=study.title,
            models={label: spec.identity() for label, spec in study.models.items()},
            cells={cell.name: cell.identity() for cell in study.cells},
        )


class StudyFolder:
    """The folder of one study. Any number of processes may use it at once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.report = out / "report"

    def claim(self, study: Study) -> None:
        """Prepare the folder for a study. Raise an error if it holds other files, or another study."""
        make_folder(self.out)
        # Results that were published have study.json and the cells, without the states of the cells.
        is_marked(self.out, "study.json" if (self.out / "study.json").exists() else "state", "a study")
        for name in ("state", "cells"):
            make_folder(self.out / name)
        with writing(self.out), self.lock_all():
            path, asked = self.out / "study.json", StudyRecord.of(study)
            if path.exists():
                refuse_changed(read_record(path, StudyRecord), asked, self.out, study.path)
            write_json(path, asked.model_dump(mode="json"))

    def run_folder(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.out / "cells" / cell.name

    def lock_all(self) -> FileLock:
        """The lock for what concerns all cells: study.json, the summary and the report."""
        return FileLock(self.out / "state" / ".study.lock")

    def lock(self, cell: Cell) -> FileLock:
        """The lock of a cell. The process that holds it works on the cell."""
        return FileLock(self.out / "state" / f"{cell.name}.lock")

    def outcome(self, cell: Cell) -> Outcome:
        """The state of a cell. If the file cannot be read, the cell counts as waiting, and its run folder decides."""
        try:
            return read_record(self._state(cell), Outcome)
        except GatelensError:
            return Outcome.new(cell.name)

    def write(self, cell: Cell, outcome: Outcome) -> None:
        """Save the state of a cell."""
        write_json(self._state(cell), outcome.model_dump(mode="json"))

    def is_done(self, cell: Cell, outcome: Outcome) -> bool:
        """Whether the cell is done as it is asked for now."""
        return (
            outcome.status == "done"
            and outcome.fingerprint == cell.fingerprint()
            and is_finished(self.run_folder(cell))
        )

    def others(self, cells: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
        """These outcomes, and those of the other cells: each of them is done, or waits."""
        return {cell.name: outcomes.get(cell.name) or self._done_or_waiting(cell) for cell in cells}

    def _done_or_waiting(self, cell: Cell) -> Outcome:
        before, run = self.outcome(cell), self.run_folder(cell)
        if self.is_done(cell, before):
            return before
        if not before.fingerprint and is_finished(run):  # results that were published, without the states of the cells
            with suppress(GatelensError):  # damaged: the cell is run again when it is asked for
                return Outcome.new(cell.name, "done", **cell.job.read(run).columns())
        return Outcome.new(cell.name)

    def set_aside(self, cell: Cell, outcome: Outcome) -> None:
        """Move the run of another fingerprint to ``outdated/``, so that the cell can be run again."""
        old = self.out / "outdated" / f"{cell.name}-{outcome.fingerprint[:8]}"
        if self.run_folder(cell).exists():
            old.parent.mkdir(exist_ok=True)
            shutil.rmtree(old, ignore_errors=True)
            self.run_folder(cell).rename(old)

    def last_change(self, cells: Sequence[Cell]) -> float:
        """When the state, result or table of heads of any of these cells last changed, in seconds since 1970."""
        ended = [self.outcome(cell).ended or 0 for cell in cells]
        files = [self.run_folder(cell) / name for cell in cells for name in (RESULT, HEADS_FILE)]
        return max(ended + [file.stat().st_mtime for file in files if file.exists()])

    def _state(self, cell: Cell) -> Path:
        return self.out / "state" / f"{cell.name}.json"


def refuse_changed(saved: StudyRecord, asked: StudyRecord, out: Path, file: Path) -> None:
    """Raise an error if a study changes or leaves out what the study in the folder asked for. It may ask for more."""
    remedy = "Undo the change to resume the study, or give another folder with --out."
    if saved.title != asked.title:
        raise GatelensError(f"{out} holds the study '{saved.title}', but {file} is '{asked.title}'. {remedy}")
    parts = (("model", saved.models, asked.models), ("cell", saved.cells, asked.cells))
    for noun, old_parts, new_parts in parts:
        for name, old in old_parts.items():
            if name not in new_parts:
                raise GatelensError(f"{out} holds the {noun} {name}, which {file} does not ask for. {remedy}")
            if old != new_parts[name]:
                key, old_value, new_value = _difference(old, new_parts[name])
                raise GatelensError(
                    f"{out} holds the {noun} {name} with {key} {old_value!r}, but {file} asks for {new_value!r}. "
                    f"{remedy}"
                )


def _difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any]:
    """The first place at which two objects differ: its key path and both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            if old.get(key) != new.get(key):
                return _difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    return name, old, new

"""A study's folder: what was asked, what became of each cell, and who is at work on it.

study.json            what was asked; a study may grow, but nothing in it may change
cells/NAME/           the run of a cell, as `gatelens circuit` and `gatelens gate` write it
state/NAME.json       what became of the cell, with the fingerprint of what was run
state/NAME.lock       held by the process that works on the cell; it ends with the process
outdated/NAME-HASH/   a cell's run from before its model, its task's file or the code changed
summary.json, .csv    what became of all cells, and the multipliers
report/               the report
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from gatelens.errors import GatelensError
from gatelens.jobs.study.cells import Cell
from gatelens.jobs.study.file import Study
from gatelens.runtime.files import read_json, write_json
from gatelens.runtime.run_folder import RESULT

Status = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    name: str
    status: Status = "waiting"
    fingerprint: str = ""
    count: float | None = None  # gates that explain the threshold; for roles, heads that facilitate in all seeds
    total: int | None = None  # gates in all
    sparse: bool | None = None  # whether the model's attention is gated
    seconds: float | None = None
    reason: str | None = None  # of a failure, in one sentence
    trace: str | None = None  # where an unforeseen failure happened
    process: int | None = None  # the last one at work on it
    ended: float | None = None  # seconds since 1970


class StudyFolder:
    """The folder of one study; any number of processes may use it at once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.report = out / "report"

    def claim(self, study: Study) -> None:
        """Make the folder this study's, or refuse if another study's work is in it."""
        if self.out.exists() and not self.out.is_dir():
            raise GatelensError(f"{self.out} is a file: give a folder, or a name that does not exist yet.")
        if self.out.is_dir() and not (self.out / "state").is_dir() and any(self.out.iterdir()):
            raise GatelensError(f"{self.out} holds other files and no study: give an empty or a new folder.")
        try:
            for name in ("state", "cells"):
                (self.out / name).mkdir(parents=True, exist_ok=True)
            with self.whole_lock():
                path = self.out / "study.json"
                wanted = {
                    "title": study.title,
                    "models": {label: spec.identity() for label, spec in study.models.items()},
                    "cells": {cell.name: cell.identity() for cell in study.cells},
                }
                if path.exists():
                    refuse_changed(read_json(path), wanted, self.out, study.path)
                write_json(path, wanted)
        except OSError as error:
            raise GatelensError(f"cannot write to {self.out}: {error.strerror}. Give another folder.") from error

    def run_folder(self, cell: Cell) -> Path:
        return self.out / "cells" / cell.name

    def whole_lock(self) -> FileLock:
        """For what concerns all cells: study.json, the summary and the report."""
        return FileLock(self.out / "state" / ".study.lock")

    def lock(self, cell: Cell) -> FileLock:
        """Whoever holds it works on the cell. It is the operating system's: a process that dies gives it back."""
        return FileLock(self.out / "state" / f"{cell.name}.lock")

    def outcome(self, cell: Cell) -> Outcome:
        """What became of a cell. A record that cannot be read counts as none: the run's own folder knows the truth."""
        try:
            record = read_json(self._record(cell))
            known = {one.name for one in fields(Outcome)}
            return Outcome(**{key: value for key, value in record.items() if key in known})
        except (GatelensError, TypeError):
            return Outcome(cell.name)

    def write(self, cell: Cell, outcome: Outcome) -> None:
        write_json(self._record(cell), asdict(outcome))

    def is_done(self, cell: Cell, outcome: Outcome) -> bool:
        """Whether the cell is done as it is asked for now."""
        return (
            outcome.status == "done"
            and outcome.fingerprint == cell.fingerprint()
            and (self.run_folder(cell) / RESULT).exists()
        )

    def set_aside(self, cell: Cell, outcome: Outcome) -> None:
        """Move away the run of another fingerprint, so that the cell can be run anew. Nothing is thrown away."""
        old = self.out / "outdated" / f"{cell.name}-{outcome.fingerprint[:8]}"
        if self.run_folder(cell).exists():
            old.parent.mkdir(exist_ok=True)
            shutil.rmtree(old, ignore_errors=True)
            self.run_folder(cell).rename(old)

    def _record(self, cell: Cell) -> Path:
        return self.out / "state" / f"{cell.name}.json"


def refuse_changed(there: Mapping[str, Any], wanted: Mapping[str, Any], out: Path, file: Path) -> None:
    """Refuse a study that changes or leaves out what the folder's study asked for; it may ask for more."""
    remedy = "Undo the change to go on, or give another folder with --out."
    if there.get("title") != wanted["title"]:
        raise GatelensError(
            f"{out} holds the study '{there.get('title')}', and {file} is '{wanted['title']}'. {remedy}"
        )
    for part, what in (("models", "model"), ("cells", "cell")):
        for name, before in there.get(part, {}).items():
            if name not in wanted[part]:
                raise GatelensError(f"{out} holds the {what} {name}, which {file} does not ask for. {remedy}")
            if before != (now := wanted[part][name]):
                key, old, new = _difference(before, now)
                raise GatelensError(
                    f"{out} holds the {what} {name} with {key} {old!r}, and {file} asks for {new!r}. {remedy}"
                )


def _difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any]:
    """The first place at which two objects differ: its name and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if old.get(key) != new.get(key):
                return _difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    return name, old, new

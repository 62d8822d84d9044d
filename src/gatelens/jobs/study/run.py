"""Run a study on this machine: cell by cell, whatever fails, and then the summary and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gatelens.errors import GatelensError
from gatelens.jobs.study.cells import Cell
from gatelens.jobs.study.cost import gate_forwards
from gatelens.jobs.study.file import Study
from gatelens.jobs.study.folder import Outcome, StudyFolder
from gatelens.jobs.study.summary import Summary, multipliers
from gatelens.jobs.study.work import OneModel, run_cell
from gatelens.measures.roles_result import RolesSettings
from gatelens.runtime.processes import n_processes

Engine = Literal["local", "ray"]
ENGINES = ("local", "ray")
_PAUSE = 0.5  # seconds before asking again whether another process is done with a cell


def run_study(
    study: Study,
    out: str | Path,
    *,
    engine: Engine = "local",
    address: str | None = None,
    console: Console | None = None,
) -> Summary:
    """Run every cell that is not done, then write the summary and the report into the study's folder.

    engine: this process, or Ray's workers (``address``: an existing cluster; default: a Ray of this machine). A study
    that was killed continues; several processes may run the same study in the same folder, each on other cells.
    """
    if engine not in ENGINES:
        raise GatelensError(f"no engine '{engine}': engines are {' and '.join(ENGINES)}.")
    if address is not None and engine != "ray":
        raise GatelensError("an address is that of a Ray cluster: it goes with the engine ray.")
    if n_processes() > 1:  # which would work on one cell together, while each of them takes another
        raise GatelensError(
            "a study is not started by `accelerate launch`: start the same command several times, and they share its "
            "cells, or use the engine ray."
        )
    folder, run = StudyFolder(Path(out).resolve()), run_here
    if engine == "ray":
        from gatelens.jobs.study.ray_engine import check_ray, run_on_ray

        check_ray()
        run = partial(run_on_ray, address=address)
    folder.claim(study)
    display = Display(console or Console(stderr=True), len(study.cells))
    with display.progress:
        outcomes = run(study, folder, display)
    return _finish(study, folder, outcomes)


class Display:
    """One progress display for all cells: how many are done, and how far the one at work is."""

    def __init__(self, console: Console, total: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self.all = self.progress.add_task("cells", total=total)
        self.part = self.progress.add_task("", total=None, visible=False)
        self.cell = ""

    def at(self, what: str) -> None:
        """Say what is being worked on."""
        self.cell = what
        self.progress.update(self.part, description=escape(what), visible=True, total=None, completed=0)

    def __call__(self, what: str, done: int, total: int) -> None:
        """A cell's own progress."""
        self.progress.update(self.part, description=escape(f"{self.cell}: {what}"), completed=done, total=total)

    def ended(self, outcome: Outcome) -> None:
        if outcome.status == "failed":
            self.progress.console.print(f"{escape(outcome.name)} failed: {escape(outcome.reason or '')}", style="red")
        self.progress.advance(self.all)


def run_here(study: Study, folder: StudyFolder, display: Display) -> dict[str, Outcome]:
    """All cells in this process. Cells that another works at come last: when it is done with them, or has died."""
    begun, models = time.time(), OneModel()
    outcomes: dict[str, Outcome] = {}
    waiting = running_order(study.cells)
    while waiting:
        busy: list[Cell] = []
        for cell in waiting:
            display.at(cell.name)
            outcome = run_cell(cell, folder.out, models, progress=display, since=begun)
            if outcome is None:
                busy.append(cell)
            else:
                outcomes[cell.name] = outcome
                display.ended(outcome)
        if len(busy) == len(waiting):
            display.at(f"waiting for another process: {busy[0].name}")
            time.sleep(_PAUSE)
        waiting = busy
    return outcomes


def running_order(cells: Sequence[Cell]) -> list[Cell]:
    """Those of a model in a row; of head gating, whose cost its settings tell, the longest first.

    Several processes that share the cells then end at about the same time.
    """
    models = list(dict.fromkeys(cell.model for cell in cells))

    def place(cell: Cell) -> tuple[int, float]:
        forwards = gate_forwards(cell.settings) if isinstance(cell.settings, RolesSettings) else 0.0
        return models.index(cell.model), -forwards

    return sorted(cells, key=place)


def _finish(study: Study, folder: StudyFolder, outcomes: Mapping[str, Outcome]) -> Summary:
    """Write the summary, then the report of all cells that are done."""
    summary = Summary(study, {cell.name: outcomes[cell.name] for cell in study.cells})
    with folder.whole_lock():
        try:
            summary = replace(summary, multipliers=multipliers(study.cells, summary.outcomes, folder))
            summary.write(folder.out)
            page, problems = _report(summary, folder)
        except OSError as error:
            page, problems = None, (f"cannot write to {folder.out}: {error.strerror or error}.",)
    return replace(summary, report=page, problems=problems)


def _report(summary: Summary, folder: StudyFolder) -> tuple[Path | None, tuple[str, ...]]:
    """The report's page and what is wrong with it. One that is younger than all outcomes is left as it is."""
    from gatelens.report.page import write_report

    done = [cell for cell in summary.study.cells if summary.outcomes[cell.name].status == "done"]
    if not done:
        return None, ()
    page = folder.report / "index.html"
    if page.exists() and page.stat().st_mtime > max(one.ended or 0 for one in summary.outcomes.values()):
        return page, ()
    try:
        report = write_report([folder.run_folder(cell) for cell in done], folder.report)
    except GatelensError as error:
        return None, (f"no report: {error}",)
    return report.path, tuple(report.problems)

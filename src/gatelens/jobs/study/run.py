"""Run a study: all cells on this machine or on Ray, then the summary and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gatelens.errors import GatelensError
from gatelens.jobs.cost import duration
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._dense_heads import describe_dense_heads
from gatelens.jobs.study._folder import Outcome, StudyFolder
from gatelens.jobs.study._work import OneModel, run_cell
from gatelens.jobs.study.chosen import chosen_cells
from gatelens.jobs.study.cost import Estimate, estimates, to_do
from gatelens.jobs.study.file import Study
from gatelens.jobs.study.summary import Summary, compare, load_circuits
from gatelens.measures.method_comparison import method_lines
from gatelens.measures.thresholds import threshold_lines
from gatelens.runtime.files import WriteError, remove_half_written, writing
from gatelens.runtime.interrupts import Interrupted
from gatelens.runtime.rank import n_processes
from gatelens.runtime.settings import unknown_name

Engine = Literal["local", "ray"]
ENGINES = ("local", "ray")
_PAUSE = 0.5  # seconds between two looks at a cell that another process works on


class WrittenReport(Protocol):
    """What a function that writes a report returns."""

    @property
    def path(self) -> Path: ...
    @property
    def problems(self) -> list[str]: ...


WriteReport = Callable[[Sequence[Path], Path], WrittenReport]
"""Called as write_report(run folders, report folder), such as `gatelens.write_report`."""


def run_study(
    study: Study,
    out: str | Path,
    *,
    engine: Engine = "local",
    address: str | None = None,
    only: Sequence[str] = (),
    console: Console | None = None,
    write_report: WriteReport | None = None,
) -> Summary:
    """Run every cell that is not done, then write the summary and the report into the folder of the study.

    A study that was killed resumes. Several processes may run the same study in the same folder; they share its cells.

    Example:
        summary = run_study(read_study("heads.toml"), "runs/heads", write_report=gatelens.write_report)

    Arguments:
        study: the study, from `read_study`.
        out: the folder of the study.
        engine: ``local`` is this process; ``ray`` are the workers of Ray.
        address: the address of an existing Ray cluster. By default Ray is started on this machine.
        only: which cells to run, such as ``["model=smollm2"]`` (`chosen_cells`); all by default. The summary and the
            report have all cells of the study that are done.
        console: where progress is shown.
        write_report: writes the report; by default there is none.
    """
    if engine not in ENGINES:
        raise GatelensError(unknown_name("engine", engine, ENGINES))
    if address is not None and engine != "ray":
        raise GatelensError("an address belongs to a Ray cluster: use it with the engine ray.")
    if n_processes() > 1:  # these would work on one cell together, but each of them would take another one
        raise GatelensError(
            "a study cannot be started by `accelerate launch`: start the same command several times, and the processes "
            "share the cells, or use the engine ray."
        )
    folder, run, cells = StudyFolder(Path(out).resolve()), run_here, chosen_cells(study.cells, only)
    if engine == "ray":
        from gatelens.jobs.study._ray_engine import check_ray, run_on_ray

        check_ray()
        run = partial(run_on_ray, address=address)
    folder.claim(study)
    display = Display(console or Console(stderr=True), len(cells))
    try:
        with display.progress:
            outcomes = run(study, cells, folder, display)
    except KeyboardInterrupt as error:
        within = error.where if isinstance(error, Interrupted) else ""
        raise Interrupted(": ".join(filter(None, (display.cell, within)))) from error
    return _finish(study, folder, folder.others(study.cells, outcomes), write_report)


class Display:
    """One progress display for all cells: how many are done, and the progress of the current one."""

    def __init__(self, console: Console, total: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self.all = self.progress.add_task("cells", total=total)
        self.part = self.progress.add_task("", total=None, visible=False)
        self.cell = ""
        self._costs: dict[str, float] = {}  # estimated seconds of the cells that are not done
        self._spent, self._started = 0.0, 0.0  # estimated seconds of the cells that are done, and when they began

    def expect(self, costs: list[Estimate]) -> None:
        """Say what the cells will take, and show from now on how much time is left."""
        if any(not cost.done for cost in costs):
            self.progress.console.print(f"cost: {to_do(costs)}", highlight=False, soft_wrap=True)
        self._costs = {cost.cell.name: cost.seconds or 0.0 for cost in costs if not cost.done}
        self._started = time.monotonic()
        self._show_left()

    def at(self, title: str) -> None:
        """Show what is being worked on."""
        self.cell = title
        self.progress.update(self.part, description=escape(title), visible=True, total=None, completed=0)

    def __call__(self, title: str, done: int, total: int) -> None:
        """Show the progress within a cell."""
        self.progress.update(self.part, description=escape(f"{self.cell}: {title}"), completed=done, total=total)

    def ended(self, outcome: Outcome) -> None:
        """Count a cell that is done or has failed."""
        if outcome.status == "failed":
            self.progress.console.print(f"{escape(outcome.name)} failed: {escape(outcome.reason or '')}", style="red")
        self.progress.advance(self.all)
        self._spent += self._costs.pop(outcome.name, 0.0)
        self._show_left()

    def _show_left(self) -> None:
        """The estimated time of all cells that are left, corrected by how long the others took."""
        pace = (time.monotonic() - self._started) / self._spent if self._spent else 1.0
        left = pace * sum(self._costs.values())
        self.progress.update(self.all, description=f"cells, about {duration(left)} left" if left else "cells")


def run_here(study: Study, cells: Sequence[Cell], folder: StudyFolder, display: Display) -> dict[str, Outcome]:
    """Run these cells in this process. Cells that another process works on come last, when that process is done."""
    started, models = time.time(), OneModel()
    display.at("load the first model and estimate the cost")
    display.expect(estimates(cells, folder.out, models))
    outcomes: dict[str, Outcome] = {}
    waiting = running_order(cells)
    while waiting:
        busy: list[Cell] = []
        for cell in waiting:
            display.at(cell.name)
            outcome = run_cell(cell, folder.out, models, progress=display, since=started)
            if outcome is None:
                busy.append(cell)
            else:
                outcomes[cell.name] = outcome
                display.ended(outcome)
        if len(busy) == len(waiting):
            display.at(f"waiting for another process: {busy[0].name}")
            time.sleep(_PAUSE)
        waiting = busy
    for problem in describe_dense_heads(study, folder, folder.others(study.cells, outcomes), models, display.at):
        display.progress.console.print(problem, markup=False, soft_wrap=True)
    return outcomes


def running_order(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one model after each other, and of those the ones with the highest priority first.

    The priority is the cost if the settings determine it. Several processes that share the cells then end at about the
    same time.
    """
    models = list(dict.fromkeys(cell.model for cell in cells))
    return sorted(cells, key=lambda cell: (models.index(cell.model), -cell.job.priority(cell.settings)))


def _finish(
    study: Study, folder: StudyFolder, outcomes: Mapping[str, Outcome], write_report: WriteReport | None
) -> Summary:
    """Write the summary, then the report of all cells that are done."""
    in_order = {cell.name: outcomes[cell.name] for cell in study.cells}
    summary = Summary(study, in_order, {}, folder=folder)
    try:
        with writing(folder.out), folder.lock_all():
            circuits = load_circuits(study.cells, in_order, folder)
            summary = replace(
                summary,
                comparisons=compare(study.cells, circuits),
                methods=tuple(method_lines(circuits.values())),
                thresholds=tuple(threshold_lines(circuits.values())),
            )
            summary.write(folder.out)
            page, problems = _report(summary, folder, write_report)
            if summary.done == len(study.cells):  # no process works on a cell any more
                for place in (folder.out, folder.out / "state"):
                    remove_half_written(place)
    except WriteError as error:
        page, problems = None, (str(error),)
    return replace(summary, report=page, problems=problems)


def _report(
    summary: Summary, folder: StudyFolder, write_report: WriteReport | None
) -> tuple[Path | None, tuple[str, ...]]:
    """Write the report, unless the one that exists is newer than all cells. Returns its page and the problems."""
    done = [cell for cell in summary.study.cells if summary.outcomes[cell.name].status == "done"]
    if not done or write_report is None:
        return None, ()
    page = folder.report / "index.html"
    if page.exists() and page.stat().st_mtime > folder.last_change(summary.study.cells):
        return page, ()
    try:
        report = write_report([folder.run_folder(cell) for cell in done], folder.report)
    except GatelensError as error:
        return None, (f"no report: {error}",)
    return report.path, tuple(report.problems)

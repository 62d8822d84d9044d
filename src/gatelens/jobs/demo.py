"""The demo: how many heads of SmolLM2 do a task, and how many of its sparse version? A study like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gatelens.errors import GatelensError
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import run_study
from gatelens.jobs.study.summary import Summary

STUDY = Path(__file__).parent / "demo.toml"


def run_demo(tasks: list[str] | None = None, out: str | Path = "runs/demo") -> Summary:
    """Run the demo's study, or its cells of some tasks, print its table and say where the report is.

    Cost: some 50 forwards of 8 prompts for each task and model, about half a minute on two cores.
    """
    study = read_study(STUDY)
    known = list(dict.fromkeys(cell.task for cell in study.cells))
    for task in tasks or []:
        if task not in known:
            raise GatelensError(f"the demo has no task '{task}': its tasks are {', '.join(known)}.")
    # Fewer tasks are another study: each has a folder of its own, beside the others.
    cells = [cell for cell in study.cells if cell.task in (tasks or known)]
    folder = Path(out, "-".join(dict.fromkeys(tasks)) if tasks else "all")
    console = Console()
    console.print("How many heads explain 90 % of a task? Dense against sparse SmolLM2, eight prompts each.")
    summary = run_study(replace(study, cells=cells), folder, console=console)
    console.print(summary.table())
    for problem in (*summary.failures(), *summary.problems):
        console.print(problem, markup=False)
    console.print(f"report: {summary.report}", markup=False, soft_wrap=True)
    return summary

"""The demo: how many heads of SmolLM2 does a task need, and how many of its sparse version? It is an ordinary study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gatelens.errors import GatelensError
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import WriteReport, run_study
from gatelens.jobs.study.summary import Summary

STUDY = Path(__file__).parent / "demo.toml"


def run_demo(
    tasks: list[str] | None = None, out: str | Path = "runs/demo", *, write_report: WriteReport | None = None
) -> Summary:
    """Run the demo's study, or only its cells of some tasks, and print the summary.

    Cost: about 50 forward passes of 8 prompts for each task and model, which is half a minute on two cores.

    Arguments:
        tasks: some of the demo's tasks; by default all.
        out: the folder in which the study gets a folder of its own.
        write_report: writes the report, such as `gatelens.write_report`; by default there is none.
    """
    study = read_study(STUDY)
    known = list(dict.fromkeys(cell.task for cell in study.cells))
    for task in tasks or []:
        if task not in known:
            raise GatelensError(f"the demo has no task '{task}': its tasks are {', '.join(known)}.")
    # Fewer tasks are another study, which needs another folder.
    cells = [cell for cell in study.cells if cell.task in (tasks or known)]
    folder = Path(out, "-".join(dict.fromkeys(tasks)) if tasks else "all")
    console = Console()
    console.print("How many heads explain 90 % of a task? Dense and sparse SmolLM2, eight prompts each.")
    summary = run_study(replace(study, cells=cells), folder, console=console, write_report=write_report)
    console.print(summary.table())
    for problem in (*summary.failures(), *summary.problems):
        console.print(problem, markup=False)
    if summary.report is not None:
        console.print(f"report: {summary.report}", markup=False, soft_wrap=True)
    return summary

"""The demo, an ordinary study: which heads and edges of SmolLM2 do a task, and how many does a sparse one need?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gatelens.errors import GatelensError
from gatelens.jobs.study.file import Study, read_study
from gatelens.jobs.study.run import WriteReport, run_study
from gatelens.jobs.study.summary import Summary

STUDY = Path(__file__).parent / "demo.toml"


def run_demo(
    tasks: Sequence[str] = (),
    out: str | Path = "runs/demo",
    *,
    console: Console | None = None,
    write_report: WriteReport | None = None,
) -> Summary:
    """Run the demo's study, or only its cells of some tasks.

    Cost: about 2,000 forward passes of one prompt for the task ioi (heads and edges), and 1,000 for each other task.

    Arguments:
        tasks: some of the demo's tasks; by default all.
        out: the folder in which the study gets a folder of its own.
        console: where progress is shown.
        write_report: writes the report, such as `gatelens.write_report`; by default there is none.
    """
    study = read_study(STUDY)
    known = demo_tasks(study)
    for task in tasks:
        if task not in known:
            raise GatelensError(f"the demo has no task '{task}': its tasks are {', '.join(known)}.")
    # Fewer tasks are another study, which needs another folder.
    cells = [cell for cell in study.cells if cell.task in (tasks or known)]
    folder = Path(out, "-".join(dict.fromkeys(tasks)) if tasks else "all")
    return run_study(replace(study, cells=cells), folder, console=console, write_report=write_report)


def demo_tasks(study: Study | None = None) -> list[str]:
    """The tasks of the demo. It runs the first one if no other is asked for."""
    return list(dict.fromkeys(cell.task for cell in (study or read_study(STUDY)).cells))

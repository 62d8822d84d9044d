"""The subcommands study, for many runs from one file, and report, for a page about saved runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gatelens.cli.app import command

_SECONDS_PER_FIGURE = 0.5
_LONG_REPORT = 5.0  # seconds; a shorter report is not announced


@command("study")
def study(
    file: Annotated[Path, typer.Argument(help="the study, a TOML file", metavar="FILE.toml")],
    out: Annotated[Path | None, typer.Option(help="the folder of the study; default runs/FILE")] = None,
    engine: Annotated[str, typer.Option(help="local (this process) or ray (workers of Ray)")] = "local",
    address: Annotated[str | None, typer.Option(help="address of a Ray cluster; default: start Ray here")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="run only the cells with this model, task, level or setting, such as model=smollm2; repeatable: one "
            "key with two values means either, two keys mean both",
            metavar="KEY=PATTERN",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="give every cell the sizes of its job's preset quick; default folder runs/FILE-quick"
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list the cells, with time and memory")] = False,
) -> None:
    """Run a grid of models, tasks and settings. Cells that are done are skipped, and a failure stops no other cell."""
    from rich.console import Console

    from gatelens.jobs.study.chosen import chosen_cells
    from gatelens.jobs.study.cost import estimates, estimates_table
    from gatelens.jobs.study.file import read_study
    from gatelens.jobs.study.run import run_study
    from gatelens.report.page import write_report

    console = Console()
    asked = read_study(file, quick)
    folder = out or Path("runs") / f"{file.stem}{'-quick' * quick}"
    if dry_run:
        console.print(estimates_table(asked.title, estimates(chosen_cells(asked.cells, only or ()), folder)))
        return
    summary = run_study(
        asked,
        folder,
        engine=engine,  # type: ignore[arg-type]
        address=address,
        only=only or (),
        console=console,
        write_report=write_report,
    )
    console.print(summary.table())
    if (compared := summary.methods_table()) is not None:
        console.print(compared)
    for sentence in (*summary.failures(), *summary.problems):
        print(f"gatelens: {sentence}", file=sys.stderr)
    report = f", report {summary.report}" if summary.report else ""
    console.print(f"written to {folder}{report}", soft_wrap=True, markup=False)
    if summary.failed:
        raise typer.Exit(1)


@command("report")
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="run folders, or folders that contain run folders", metavar="DIR...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="the folder, or the single file, of the report; default: `report` next to the first DIR"),
    ] = None,
    formats: Annotated[
        str, typer.Option(help="formats of the figures, for example png,pdf,svg; the page always has PNG")
    ] = "png,svg",
    single_file: Annotated[
        bool, typer.Option("--single-file", help="write one HTML file that contains everything, to send by mail")
    ] = False,
) -> None:
    """Write a page with the figures and interactive views of saved runs. No model is loaded."""
    from gatelens.report.page import write_report

    chosen_formats = [name.strip() for name in formats.split(",") if name.strip()]
    default = folders[0].parent / ("report.html" if single_file else "report")
    written = write_report(folders, out or default, chosen_formats, single_file=single_file, announce=_announce_report)
    for problem in written.problems:
        print(f"gatelens: {problem}", file=sys.stderr)
    runs = f"{len(written.runs)} run{'s' * (len(written.runs) != 1)}"
    print(f"{runs} and {written.figures} figures in {written.path}")


def _announce_report(runs: int, figures: int) -> None:
    """Say what a long report will contain and how long it takes."""
    from gatelens.jobs.cost import duration

    seconds = _SECONDS_PER_FIGURE * figures
    if seconds >= _LONG_REPORT:
        print(f"cost: {runs} run{'s' * (runs != 1)}, {figures} figures, about {duration(seconds)}")

"""The subcommands about the roles of heads: gate, agree, contrast and relations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskName, TaskOption, default_folder, task_options
from gatelens.errors import GatelensError


@command("gate", settings="gatelens.measures.roles_result:RolesSettings")
def gate(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run folder; default runs/MODEL-TASK-gate")] = None,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Learn which heads help, hinder or do not matter in a task, and test it by ablation."""
    from rich.console import Console

    from gatelens.cli.tables import Bars, roles_table
    from gatelens.jobs.roles import find_roles, roles_cost
    from gatelens.runtime.rank import is_main
    from gatelens.runtime.run_folder import is_finished
    from gatelens.tasks import check_task

    console = Console(quiet=not is_main())
    options = task_options(option, skip_bad)
    check_task(task, settings.n + settings.held_out, options)
    loaded = load(model)
    folder = out or default_folder(loaded.name, Path(task).stem, "gate")
    if not is_finished(folder):
        console.print(f"cost: {roles_cost(loaded, task, settings, options)}", soft_wrap=True)
    with Bars(console) as bars:
        result = find_roles(loaded, task, settings, out=folder, options=options, progress=bars)
    console.print(roles_table(result))
    _draw(folder)
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("agree")
def agree(
    gates: Annotated[Path, typer.Argument(help="the folder of a gate run", metavar="GATES")],
    scores: Annotated[
        Path,
        typer.Argument(
            help="the folder of a circuit run of any level and method; --level heads --method patching is causal "
            "mediation",
            metavar="SCORES",
        ),
    ],
    k: Annotated[int, typer.Option(help="how many heads the scores mark at most; all others are compared")] = 10,
    above: Annotated[
        float | None,
        typer.Option(help="mark the heads that are this many standard deviations above the mean instead; published: 3"),
    ] = None,
    over: Annotated[str, typer.Option(help="facilitation of a head over the fits: mean, or max as published")] = "mean",
) -> None:
    """Compare learned gates with other scores: do the heads that they mark facilitate more than the others?"""
    from rich.console import Console

    from gatelens.cli.tables import patching_table
    from gatelens.measures.mediation import compare_runs
    from gatelens.runtime.files import write_json
    from gatelens.runtime.settings import unknown_name

    if over not in ("mean", "max"):
        raise GatelensError(unknown_name("value of --over", over, ("mean", "max")))
    comparison = compare_runs(gates, scores, k, above=above, over=over)  # type: ignore[arg-type]
    Console().print(patching_table(comparison))
    marked = [str(head) for head in comparison.marked]
    path = gates / "agreement.json"
    write_json(path, dataclasses.asdict(comparison) | {"marked": marked, "scores": str(scores)})
    print(f"written to {path}")


@command("contrast", settings="gatelens.measures.contrast_result:TwoTaskSettings")
def contrast(
    model: ModelName,
    keep: Annotated[str, typer.Argument(help="the task whose responses are kept", metavar="KEEP")],
    lose: Annotated[str, typer.Argument(help="the task whose responses are lost", metavar="LOSE")],
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run folder; default runs/MODEL-KEEP-LOSE-contrast")] = None,
    keep_option: Annotated[list[str] | None, typer.Option(help="an option of KEEP, as KEY=VALUE; repeatable")] = None,
    lose_option: Annotated[list[str] | None, typer.Option(help="an option of LOSE, as KEY=VALUE; repeatable")] = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Learn gates that keep the responses of one task and lose those of another: which heads tell them apart?"""
    from rich.console import Console

    from gatelens.cli.tables import Bars, contrast_table
    from gatelens.jobs.contrast import contrast_cost, find_contrast
    from gatelens.runtime.rank import is_main
    from gatelens.runtime.run_folder import is_finished
    from gatelens.tasks import check_task

    console = Console(quiet=not is_main())
    options = {
        "keep_options": task_options(keep_option, skip_bad),
        "lose_options": task_options(lose_option, skip_bad),
    }
    for name, own in zip((keep, lose), options.values(), strict=True):
        check_task(name, settings.n, own)
    if keep == lose and options["keep_options"] == options["lose_options"]:
        raise GatelensError(
            f"{keep} cannot be kept and lost at once: give two tasks, or --keep-option and --lose-option that differ."
        )
    loaded = load(model)
    folder = out or default_folder(loaded.name, Path(keep).stem, Path(lose).stem, "contrast")
    if not is_finished(folder):
        console.print(f"cost: {contrast_cost(loaded, keep, lose, settings, **options)}", soft_wrap=True)
    with Bars(console) as bars:
        result = find_contrast(loaded, keep, lose, settings, out=folder, progress=bars, **options)
    console.print(contrast_table(result))
    _draw(folder)
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("relations", settings="gatelens.measures.relations_result:RelationsSettings")
def relations(
    model: ModelName,
    settings: Any,
    source: Annotated[
        Path | None,
        typer.Option(help="a folder of word pairs, such as antonym.json; default: the built-in pairs"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the run folder; default runs/MODEL-relations")] = None,
    *,
    load: Loader,
) -> None:
    """Learn gates that keep instructions and lose examples, and the reverse; judge them on relations held out."""
    from rich.console import Console

    from gatelens.cli.role_tables import relations_table
    from gatelens.cli.tables import Bars
    from gatelens.jobs.relations import find_relations, relation_sources, relations_cost
    from gatelens.runtime.rank import is_main
    from gatelens.runtime.run_folder import is_finished

    console = Console(quiet=not is_main())
    relation_sources(source)
    loaded = load(model)
    folder = out or default_folder(loaded.name, "relations")
    if not is_finished(folder):
        console.print(f"cost: {relations_cost(loaded, settings, source)}", soft_wrap=True)
    with Bars(console) as bars:
        result = find_relations(loaded, settings, source=source, out=folder, progress=bars)
    console.print(relations_table(result))
    _draw(folder)
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("roles")
def roles(
    folders: Annotated[
        list[Path], typer.Argument(help="folders of gate runs, or folders that contain them", metavar="RUNS")
    ],
    out: Annotated[Path, typer.Option(help="where the tables and the figure are written")] = Path("runs/roles-summary"),
    above: Annotated[
        float, typer.Option(help="circuit runs mark heads that are this many standard deviations above the mean")
    ] = 3.0,
) -> None:
    """Summarise head roles over runs: shares, distributions, correlations, mediation; beside published values."""
    from rich.console import Console

    from gatelens.cli.role_tables import role_summary_tables
    from gatelens.measures.role_summary import summarise_runs
    from gatelens.report.figures import role_distribution_figure, save_figure

    console = Console()
    summary = summarise_runs(folders, above)
    for table in role_summary_tables(summary):
        console.print(table)
    for problem in summary.problems:
        console.print(problem, markup=False, soft_wrap=True)
    summary.save(out)
    save_figure(role_distribution_figure(summary.grid()), out / "distribution", ("png",))
    console.print(f"written to {out}", soft_wrap=True, markup=False)


def _draw(folder: Path) -> None:
    """Draw the figures of a run; with several processes, the main one does."""
    from gatelens.report.run_figures import draw_run
    from gatelens.runtime.rank import is_main

    if is_main():
        draw_run(folder)

"""The subcommands about the roles of heads: gate, agree, contrast and relations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskName, TaskOption, default_folder, task_options


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
    from gatelens.runtime.processes import is_main
    from gatelens.runtime.run_folder import is_finished

    console = Console(quiet=not is_main())
    loaded = load(model)
    folder = out or default_folder(loaded.name, Path(task).stem, "gate")
    options = task_options(option, skip_bad)
    if not is_finished(folder):
        console.print(str(roles_cost(loaded, task, settings, options)))
    with Bars(console) as bars:
        result = find_roles(loaded, task, settings, out=folder, options=options, progress=bars)
    console.print(roles_table(result))
    _draw(folder)
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("agree")
def agree(
    gates: Annotated[Path, typer.Argument(help="the folder of a gate run", metavar="GATES")],
    patching: Annotated[
        Path, typer.Argument(help="the folder of a circuit run: --level heads --method patching", metavar="PATCHING")
    ],
    k: Annotated[
        int, typer.Option(help="how many heads patching marks at most; all others are compared with them")
    ] = 10,
) -> None:
    """Compare learned gates with patching: do the heads that patching marks facilitate more than the others?"""
    from rich.console import Console

    from gatelens.cli.tables import patching_table
    from gatelens.measures.mediation import compare_runs
    from gatelens.runtime.files import write_json

    comparison = compare_runs(gates, patching, k)
    Console().print(patching_table(comparison))
    marked = [str(head) for head in comparison.marked]
    path = gates / "agreement.json"
    write_json(path, dataclasses.asdict(comparison) | {"marked": marked, "patching": str(patching)})
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
    from gatelens.runtime.processes import is_main
    from gatelens.runtime.run_folder import is_finished

    console = Console(quiet=not is_main())
    loaded = load(model)
    folder = out or default_folder(loaded.name, Path(keep).stem, Path(lose).stem, "contrast")
    options = {
        "keep_options": task_options(keep_option, skip_bad),
        "lose_options": task_options(lose_option, skip_bad),
    }
    if not is_finished(folder):
        console.print(str(contrast_cost(loaded, keep, lose, settings, **options)))
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
    from gatelens.jobs.relations import find_relations, relations_cost
    from gatelens.runtime.processes import is_main
    from gatelens.runtime.run_folder import is_finished

    console = Console(quiet=not is_main())
    loaded = load(model)
    folder = out or default_folder(loaded.name, "relations")
    if not is_finished(folder):
        console.print(str(relations_cost(loaded, settings, source)))
    with Bars(console) as bars:
        result = find_relations(loaded, settings, source=source, out=folder, progress=bars)
    console.print(relations_table(result))
    _draw(folder)
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


def _draw(folder: Path) -> None:
    """Draw the figures of a run; with several processes, the main one does."""
    from gatelens.report.run_figures import draw_run
    from gatelens.runtime.processes import is_main

    if is_main():
        draw_run(folder)

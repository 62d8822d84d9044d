"""Learn what heads are for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskName, TaskOption, task_options


@command("gate", settings="gatelens.jobs.roles:GateSettings")
def gate(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/MODEL-TASK-gate")] = None,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Learn which heads help, hinder or do not matter in a task, and prove it by ablation."""
    from rich.console import Console

    from gatelens.cli.tables import Bars, roles_table
    from gatelens.jobs.roles import find_roles
    from gatelens.runtime.processes import is_main

    console = Console(quiet=not is_main())
    loaded = load(model)
    folder = out or Path("runs") / f"{loaded.name}-{Path(task).stem}-gate".replace("/", "-")
    with Bars(console) as bars:
        options = task_options(option, skip_bad)
        result = find_roles(loaded, task, settings, out=folder, options=options, progress=bars)
    console.print(roles_table(result))
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("agree")
def agree(
    gates: Annotated[Path, typer.Argument(help="folder of a gate run", metavar="GATES")],
    patching: Annotated[
        Path, typer.Argument(help="folder of a circuit run: --level heads --method patching", metavar="PATCHING")
    ],
    k: Annotated[int, typer.Option(help="compare up to so many heads that patching marks with all others")] = 10,
) -> None:
    """Do learned gates and patching agree? The facilitation of heads that patching marks, against the others'."""
    from rich.console import Console

    from gatelens.cli.tables import agreement_table
    from gatelens.measures.mediation import compare_runs
    from gatelens.runtime.files import write_json

    found = compare_runs(gates, patching, k)
    Console().print(agreement_table(found))
    about = dataclasses.asdict(found) | {"marked": [str(head) for head in found.marked], "patching": str(patching)}
    write_json(gates / "agreement.json", about)
    print(f"written to {gates / 'agreement.json'}")


@command("contrast", settings="gatelens.jobs.contrast:TwoTaskSettings")
def contrast(
    model: ModelName,
    keep: Annotated[str, typer.Argument(help="the task whose responses are kept", metavar="KEEP")],
    lose: Annotated[str, typer.Argument(help="the task whose responses are lost", metavar="LOSE")],
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/MODEL-KEEP-LOSE-contrast")] = None,
    keep_option: Annotated[list[str] | None, typer.Option(help="an option of KEEP, as KEY=VALUE; repeatable")] = None,
    lose_option: Annotated[list[str] | None, typer.Option(help="an option of LOSE, as KEY=VALUE; repeatable")] = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Learn gates that keep one task's responses and lose another's: which heads tell two ways of asking apart?"""
    from rich.console import Console

    from gatelens.cli.tables import Bars, contrast_table
    from gatelens.jobs.contrast import find_contrast
    from gatelens.runtime.processes import is_main

    console = Console(quiet=not is_main())
    loaded = load(model)
    name = f"{loaded.name}-{Path(keep).stem}-{Path(lose).stem}-contrast".replace("/", "-")
    folder = out or Path("runs") / name
    with Bars(console) as bars:
        result = find_contrast(
            loaded,
            keep,
            lose,
            settings,
            out=folder,
            keep_options=task_options(keep_option, skip_bad),
            lose_options=task_options(lose_option, skip_bad),
            progress=bars,
        )
    console.print(contrast_table(result))
    console.print(f"written to {folder}", soft_wrap=True, markup=False)

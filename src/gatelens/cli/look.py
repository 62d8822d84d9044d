"""The subcommands for a first look: the demo, and which models and tasks there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskOption, task_options
from gatelens.errors import GatelensError


@command("demo")
def demo(
    task: Annotated[
        list[str] | None,
        typer.Option(help="the task: ioi, greater-than, docstring or ioi-long; repeatable; default: ioi"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="run all four tasks")] = False,
    out: Annotated[Path, typer.Option(help="the folder for the study and its report")] = Path("runs/demo"),
) -> None:
    """Show which heads and edges of SmolLM2 do a task, and how many its sparse version needs. Takes a few minutes."""
    from rich.console import Console

    from gatelens.cli.head_table import head_table
    from gatelens.cli.tables import circuit_sentence
    from gatelens.jobs.demo import demo_tasks, run_demo
    from gatelens.report.page import write_report

    if task and every:
        raise GatelensError("--all runs all tasks: give it without --task.")
    known, console = demo_tasks(), Console()
    tasks = [] if every else task or known[:1]
    shown = ", ".join(tasks or known)
    question = f"Which heads of SmolLM2 do {shown}, what do they do, and how many does its sparse version need?"
    console.print(question, markup=False)
    summary = run_demo(tasks, out, console=console, write_report=write_report)
    circuits = summary.circuits()
    for circuit in circuits:
        if circuit.heads is not None:
            console.print(head_table(circuit.heads))
    for circuit in circuits:
        console.print(circuit_sentence(circuit), soft_wrap=True)
    for comparison in summary.multipliers:
        console.print(f"{comparison.task}, {comparison.level}: dense / sparse = {comparison.shown}", soft_wrap=True)
    for problem in (*summary.failures(), *summary.problems):
        console.print(problem, markup=False, soft_wrap=True)
    if summary.report is not None:
        page = f"The page with the figures, the circuits and the attention: {summary.report}"
        console.print(page, markup=False, soft_wrap=True)
    if not every:
        console.print(f"All tasks ({', '.join(known)}): `gatelens demo --all`.", soft_wrap=True)
    if summary.failed:
        raise typer.Exit(1)


@command("models")
def models() -> None:
    """List the built-in models and the families that can be loaded."""
    from rich.console import Console
    from rich.table import Table

    from gatelens.loading import BUILT_IN
    from gatelens.model.families import FAMILIES

    table = Table("built-in", "description")
    for name, description in BUILT_IN.items():
        table.add_row(name, description)
    console = Console()
    console.print(table)
    console.print(f"Families: {', '.join(sorted(FAMILIES))}.", soft_wrap=True)
    console.print("Any hub id, folder or .gguf file of these families can be loaded.", soft_wrap=True)


@command("inspect")
def inspect_model(
    model: ModelName,
    length: Annotated[int, typer.Option(help="count attention edges of a prompt of this many tokens")] = 128,
    *,
    load: Loader,
) -> None:
    """Print a model's layers, heads, KV heads, parameters and numbers of edges."""
    from rich.console import Console

    from gatelens.cli.tables import anatomy_table

    if length < 1:
        raise GatelensError(f"--length is {length}: it must be at least 1.")
    Console().print(anatomy_table(load(model), length))


@command("tasks")
def tasks(
    task: Annotated[str | None, typer.Argument(help="the task to try; needs --model", metavar="TASK")] = None,
    model: Annotated[str | None, typer.Option(help="try the task on this model")] = None,
    n: Annotated[int | None, typer.Option(help="number of prompts; default 64")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="8 prompts, unless --n is given")] = False,
    seed: Annotated[int, typer.Option(help="task seed")] = 0,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """List the tasks. With a TASK and --model, show some prompts and how well the model does."""
    from rich.console import Console

    from gatelens.cli.task_tables import listing, render
    from gatelens.tasks import check_task
    from gatelens.tasks import task as make_task
    from gatelens.tasks.preview import preview

    console = Console()
    if task is None and model is None:
        console.print(listing())
        return
    if task is None or model is None:
        raise GatelensError("to try a task, give a TASK and a --model: `gatelens tasks ioi --model smollm2`.")
    from gatelens.jobs.evaluation import preview_cost

    options = task_options(option, skip_bad)
    n_prompts = (8 if quick else 64) if n is None else n
    check_task(task, n_prompts, options)
    loaded = load(model)
    prompts = make_task(task, loaded, n=n_prompts, seed=seed, **options)
    console.print(f"cost: {preview_cost(loaded, prompts)}", soft_wrap=True)
    console.print(render(preview(loaded, prompts)))

"""Find circuits, and evaluate those of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskName, TaskOption, task_options


@command("circuit", settings="gatelens.jobs.circuit:CircuitSettings")
def circuit(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/MODEL-TASK-LEVEL-METHOD")] = None,
    dense: Annotated[
        str | None,
        typer.Option(
            help="the name of the dense model that a report compares this one with; default: by shape and name"
        ),
    ] = None,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Find the heads or edges that do a task: score them, keep the top k, and say how much they explain."""
    from rich.console import Console

    from gatelens.cli.tables import Bars, circuit_table
    from gatelens.jobs.circuit import find_circuit, memory_estimate

    console = Console()
    loaded = load(model)
    folder = out or Path("runs") / f"{loaded.name}-{Path(task).stem}-{settings.level}-{settings.method}".replace(
        "/", "-"
    )
    weights, runs = memory_estimate(loaded, settings)
    console.print(f"memory: about {weights:.1f} GB for the weights and up to {runs:.1f} GB for runs (--memory-gb)")
    with Bars(console) as bars:
        options = task_options(option, skip_bad)
        result = find_circuit(loaded, task, settings, out=folder, options=options, dense=dense, progress=bars)
    console.print(circuit_table(result))
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("effect")
def effect(
    model: ModelName,
    task: TaskName,
    graph: Annotated[
        Path, typer.Argument(help="a circuit as EAP-IG and the MIB track write it (JSON)", metavar="GRAPH")
    ],
    n: Annotated[int, typer.Option(help="prompts")] = 64,
    seed: Annotated[int, typer.Option(help="task seed")] = 0,
    memory_gb: Annotated[float, typer.Option(help="memory budget for runs, in GB")] = 4.0,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Evaluate an edge circuit from elsewhere: how much of the task does it explain?"""
    from gatelens.measures.curves import edges_effect
    from gatelens.measures.exchange import read_graph
    from gatelens.model.graph import Graph
    from gatelens.runtime.context import Context
    from gatelens.tasks import task as make_task

    loaded = load(model)
    shape = Graph.of(loaded.anatomy)
    _, kept = read_graph(graph, shape)
    made = make_task(task, loaded, n=n, seed=seed, **task_options(option, skip_bad))
    inside, rest = edges_effect(loaded, made, kept, context=Context(memory_gb))  # type: ignore[arg-type]
    counted = int(shape.on_a_path(kept[None]).sum())
    print(f"{counted:,} of {shape.n_edges:,} edges on a path explain {inside:.3f}; all others explain {rest:.3f}")

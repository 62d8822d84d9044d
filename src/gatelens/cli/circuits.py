"""The subcommands about circuits: find one, and evaluate one that another program has found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskName, TaskOption, default_folder, task_options
from gatelens.errors import GatelensError


@command("circuit", settings="gatelens.jobs.circuit:CircuitSettings")
def circuit(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run folder; default runs/MODEL-TASK-LEVEL-METHOD")] = None,
    dense: Annotated[
        str | None,
        typer.Option(help="the dense model that a report compares this one with; default: by shape and name"),
    ] = None,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Find the heads or edges that do a task: score them, keep the top k, and measure how much they explain."""
    from rich.console import Console

    from gatelens.cli.head_table import head_table
    from gatelens.cli.tables import Bars, circuit_table, stability_table, tests_tables
    from gatelens.jobs.circuit import find_circuit, memory_estimate
    from gatelens.jobs.circuit_cost import circuit_cost
    from gatelens.runtime.run_folder import is_finished
    from gatelens.tasks import check_task

    console = Console()
    options = task_options(option, skip_bad)
    check_task(task, settings.n, options)
    loaded = load(model)
    folder = out or default_folder(loaded.name, Path(task).stem, settings.level, settings.method)
    weights, runs = memory_estimate(loaded, settings)
    if not is_finished(folder):
        console.print(f"cost: {circuit_cost(loaded, task, settings, options)}", soft_wrap=True)
        console.print(f"memory: about {weights:.1f} GB for the weights and up to {runs:.1f} GB for runs (--memory-gb)")
    with Bars(console) as bars:
        result = find_circuit(loaded, task, settings, out=folder, options=options, dense=dense, progress=bars)
    if result.heads is not None:
        console.print(head_table(result.heads))
    console.print(circuit_table(result))
    if result.tests is not None:
        console.print(*tests_tables(result.tests), sep="\n")
    if result.stability is not None:
        console.print(stability_table(result.stability))
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


@command("effect")
def effect(
    model: ModelName,
    task: TaskName,
    graph: Annotated[
        Path,
        typer.Argument(help="a circuit as EAP-IG and the MIB track save it (.json or .pt)", metavar="GRAPH"),
    ],
    n: Annotated[int, typer.Option(help="number of prompts")] = 64,
    seed: Annotated[int, typer.Option(help="task seed")] = 0,
    memory_gb: Annotated[float, typer.Option(help="memory budget for runs, in GB, besides the model itself")] = 4.0,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Evaluate an edge circuit that another program has found: how much of the task does it explain?"""
    from gatelens.measures.effect import edges_effect
    from gatelens.measures.exchange import read_graph
    from gatelens.model.graph import Graph
    from gatelens.runtime.context import Context
    from gatelens.tasks import check_task
    from gatelens.tasks import task as make_task

    if not 0 < memory_gb < math.inf:
        raise GatelensError(f"--memory-gb is {memory_gb}: it must be a finite number above 0.")
    options = task_options(option, skip_bad)
    check_task(task, n, options)
    loaded = load(model)
    model_graph = Graph.of(loaded.anatomy)
    _, circuit_edges = read_graph(graph, model_graph, loaded.anatomy.width)
    prompts = make_task(task, loaded, n=n, seed=seed, **options)
    inside, rest = edges_effect(loaded, prompts, circuit_edges, context=Context(memory_gb))  # type: ignore[arg-type]
    count = int(model_graph.on_a_path(circuit_edges[None]).sum())
    print(
        f"{count:,} of {model_graph.n_edges:,} edges are on a path in the circuit and explain {inside:.3f}; all other "
        f"edges explain {rest:.3f} ({len(prompts)} prompts)"
    )


@command("export")
def export(
    run: Annotated[Path, typer.Argument(help="the folder of a run of `gatelens circuit --level edges`", metavar="RUN")],
    out: Annotated[
        Path,
        typer.Argument(
            help="a file (.json or .pt) for EAP-IG and MIB, or a folder for circuit-tracer's viewer", metavar="OUT"
        ),
    ],
    k: Annotated[int | None, typer.Option(help="keep this many edges; default: the circuit at the threshold")] = None,
) -> None:
    """Write the edge circuit of a run for EAP-IG, the MIB track, circuit-tracer's viewer or Neuronpedia."""
    from gatelens.jobs.export import export_circuit

    print(f"written to {export_circuit(run, out, k)}")

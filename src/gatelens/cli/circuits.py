"""The subcommands about circuits: find one, and evaluate one that another program has found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatelens.cli.app import command
from gatelens.cli.options import Loader, ModelName, SkipBad, TaskName, TaskOption, default_folder, task_options

if TYPE_CHECKING:
    from gatelens.jobs.described import Dense


@command("circuit", settings="gatelens.measures.circuit_settings:CircuitSettings")
def circuit(
    model: ModelName,
    task: TaskName,
    settings: Any,
    out: Annotated[Path | None, typer.Option(help="the run folder; default runs/MODEL-TASK-LEVEL-METHOD")] = None,
    dense: Annotated[
        str | None,
        typer.Option(
            help="the dense model of a sparse one, or a run folder of it: the table of heads shows it beside the "
            "sparse model, and a report compares the two; default in a report: by shape and name",
            metavar="RUN_OR_MODEL",
        ),
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
    from gatelens.jobs.circuit import find_circuit
    from gatelens.jobs.circuit_cost import circuit_cost
    from gatelens.jobs.circuit_memory import memory_estimate
    from gatelens.loading import made_from
    from gatelens.runtime.rank import is_main
    from gatelens.runtime.run_folder import is_finished
    from gatelens.tasks import check_task

    console = Console(quiet=not is_main())
    options = task_options(option, skip_bad)
    check_task(task, settings.n, options)
    loaded = load(model)
    dense_one = None if dense is None else _dense(dense, load)
    folder = out or default_folder(loaded.name, Path(task).stem, settings.level, settings.method)
    weights, runs = memory_estimate(loaded, settings)
    if not is_finished(folder):
        console.print(f"cost: {circuit_cost(loaded, task, settings, options)}", soft_wrap=True)
        console.print(f"memory: about {weights:.1f} GB for the weights and up to {runs:.1f} GB for runs (--memory-gb)")
    with Bars(console) as bars:
        result = find_circuit(loaded, task, settings, out=folder, options=options, dense=dense_one, progress=bars)
    if result.heads is not None:
        console.print(head_table(result.heads))
        if (base := made_from(model)) is not None and result.heads.dense is None:
            hint = f"the same command with --dense {base} shows these heads of the dense model beside them"
            console.print(hint, soft_wrap=True, markup=False)
    console.print(circuit_table(result))
    if result.tests is not None:
        console.print(*tests_tables(result.tests), sep="\n")
    if result.stability is not None:
        console.print(stability_table(result.stability))
    console.print(f"written to {folder}", soft_wrap=True, markup=False)


def _dense(name: str, load: Loader) -> Dense:
    """The dense model, or its circuit in a run folder."""
    from gatelens.measures.circuit_result import load_circuit
    from gatelens.runtime.run_folder import is_finished

    return load_circuit(name) if is_finished(Path(name)) else load.replace(bias=None)(name)


@command("effect", settings="gatelens.jobs.evaluation:EffectSettings")
def effect(
    model: ModelName,
    task: TaskName,
    graph: Annotated[
        Path,
        typer.Argument(help="a circuit as EAP-IG and the MIB track save it (.json or .pt)", metavar="GRAPH"),
    ],
    settings: Any,
    option: TaskOption = None,
    skip_bad: SkipBad = False,
    *,
    load: Loader,
) -> None:
    """Evaluate an edge circuit that another program has found: how much of the task does it explain?"""
    from gatelens.jobs.circuit_tasks import circuit_tasks
    from gatelens.jobs.evaluation import effect_cost
    from gatelens.measures.circuit_settings import CircuitSettings
    from gatelens.measures.effect import edges_effect
    from gatelens.measures.exchange import read_graph
    from gatelens.model.graph import Graph
    from gatelens.runtime.context import Context
    from gatelens.tasks import check_task

    options = task_options(option, skip_bad)
    check_task(task, settings.n, options)
    loaded = load(model)
    model_graph = Graph.of(loaded.anatomy)
    _, circuit_edges = read_graph(graph, model_graph, loaded.anatomy.width)
    prompts = circuit_tasks(loaded, task, CircuitSettings(n=settings.n, seed=settings.seed), options).first
    print(f"cost: {effect_cost(loaded, prompts, settings.memory_gb)}", flush=True)
    inside, rest = edges_effect(loaded, prompts, circuit_edges, context=Context(settings.memory_gb))
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

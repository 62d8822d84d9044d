"""What the best heads of a circuit do, and what the same heads do in the dense model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gatelens.errors import GatelensError
from gatelens.gates.scores import Scores
from gatelens.measures.circuit_result import CircuitResult, load_circuit, record_dense
from gatelens.measures.describe import best_heads, check_dense, describe, with_dense
from gatelens.measures.head_table import HeadTable, save_head_table
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.rank import is_main
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import take

DESCRIBED_PROMPTS = 32
"""What heads do is measured on at most this many prompts."""

Dense = str | Model | CircuitResult
"""The dense model of a sparse one: its name, the model itself, or a circuit that was found in it."""


def name_of(dense: Dense | None) -> str | None:
    """The name of the dense model."""
    if isinstance(dense, Model):
        return dense.name
    return dense.model if isinstance(dense, CircuitResult) else dense


def check_dense_one(dense: Dense | None, model: Model, task: CircuitTask) -> None:
    """Raise an error if a dense model, or a circuit of it, does not fit a sparse model and its task."""
    if isinstance(dense, Model):
        check_dense(dense, model, task)
    if not isinstance(dense, CircuitResult):
        return
    if dense.task != task.name:
        raise GatelensError(
            f"the circuit of {dense.model} is one of {dense.task}, not of {task.name}: give another run."
        )
    graph = dense.graph  # None: saved by version 0.1
    if graph is not None and (graph.n_layers, graph.n_heads) != (model.n_layers, model.n_heads):
        raise GatelensError(
            f"the circuit is one of {dense.model}, which has {graph.n_layers} x {graph.n_heads} heads, and "
            f"{model.name} has {model.n_layers} x {model.n_heads}: give a run of the dense model that the sparse one "
            "was made from."
        )


def describe_best(model: Model, task: CircuitTask, scores: Scores, n: int, context: Context) -> HeadTable | None:
    """What the n best heads do, on the first prompts; None if no head is asked for or gates do not belong to heads."""
    heads = best_heads(scores, n)
    return describe(model, take(task, DESCRIBED_PROMPTS), heads, context=context) if heads else None


def beside_dense(table: HeadTable | None, task: CircuitTask, dense: Dense | None, context: Context) -> HeadTable | None:
    """The table of a sparse model with that of its dense model beside it.

    A dense model is run on the prompts of the table, and has a line for each of its heads. A circuit of the dense model
    has lines for the heads that its own table describes. With a name alone, the table stays as it is.
    `check_dense_one` comes first.
    """
    if table is None or dense is None or isinstance(dense, str):
        return table
    if isinstance(dense, CircuitResult):
        return table if dense.heads is None else table.beside(dense.heads)
    return dense_lines(table, task, dense, context)


def dense_lines(table: HeadTable, task: CircuitTask, dense: Model, context: Context) -> HeadTable:
    """The table with the lines of the dense model, which is not run if the table has them."""
    names = {line.head for line in table.lines}
    saved = table.dense
    if saved is not None and saved.model == dense.name and names == {line.head for line in saved.lines}:
        return table
    return with_dense(table, take(task, DESCRIBED_PROMPTS), dense, context)


def finished(folder: Path, task: CircuitTask, dense: Dense | None, context: Context) -> CircuitResult:
    """The result of a finished run, whose dense model may be named only now."""
    result = load_circuit(folder)
    if dense is None:
        return result
    heads = beside_dense(result.heads, task, dense, context)
    if is_main():
        record_dense(folder, name_of(dense))
        if heads is not None and heads != result.heads:
            save_head_table(heads, folder)
    return replace(result, heads=heads, dense=name_of(dense))

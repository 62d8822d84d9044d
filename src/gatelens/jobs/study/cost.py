"""What a study will take: forward passes, seconds and memory of each cell, before anything is run.

Forward passes are those of one prompt. A forward and backward pass counts as two. Seconds come from one timed forward
pass of the model. If the model is not on this machine, they come from its number of parameters and a timed matrix
product.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from gatelens.jobs.cost import duration, seconds_per_forward
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._folder import StudyFolder
from gatelens.jobs.study._work import OneModel, reason_of
from gatelens.jobs.study.models import ModelSpec
from gatelens.loading import BUILT_IN
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks import task as make_task

_LENGTH = 32  # tokens of a prompt, if none can be made
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KNOWN_SIZES = {**dict.fromkeys(BUILT_IN, 1.35e8), "gpt2": 1.24e8, "openai-community/gpt2": 1.24e8}
_TIMED_PROMPTS = 4


@dataclass(frozen=True)
class Measurement:
    """What the cost of a cell depends on.

    Arguments:
        length: tokens of a prompt.
        seconds: time of one forward pass of one prompt; None if it is not known.
        weights_gb: memory of the weights; None if it is not known.
        runs_gb: memory of runs.
        note: how this was found out, for people.
    """

    graph: Graph
    length: int
    seconds: float | None
    weights_gb: float | None
    runs_gb: float
    note: str


@dataclass(frozen=True)
class Estimate:
    """The cost of one cell.

    Arguments:
        seconds: None if it is not known.
        memory_gb: None if it is not known.
        note: whether the cell is done, or how the cost was found out.
    """

    cell: Cell
    forwards: float
    seconds: float | None
    memory_gb: float | None
    note: str
    done: bool = False


def estimates(cells: Sequence[Cell], out: Path, models: OneModel | None = None) -> list[Estimate]:
    """The cost of each of these cells.

    Arguments:
        models: loads the models of a run that is about to start. Only the first model that it needs is loaded, because
            it keeps one model. The sparse version of that model, or its dense one, is taken to cost the same, and
            other models are guessed. By default all models on this machine are loaded, one after the other.
    """
    folder = StudyFolder(out)
    left = [cell for cell in cells if not folder.is_done(cell, folder.outcome(cell))]
    if models is None:
        every = OneModel()
        return [_estimate(cell, folder, lambda cell: cell.model, every) for cell in cells]
    first = left[0].model if left else None
    return [_estimate(cell, folder, lambda cell: _related(cell.model, first), models) for cell in cells]


def _related(spec: ModelSpec, first: ModelSpec | None) -> ModelSpec | None:
    """The first model, if this is the same model or the sparse or dense version of it; otherwise None."""
    if first is None or (first.label not in (spec.label, spec.dense) and first.dense != spec.label):
        return None
    return first


def to_do(costs: list[Estimate]) -> str:
    """What all cells that are not done will take, as part of a sentence."""
    left = [cost for cost in costs if not cost.done]
    forwards = sum(cost.forwards for cost in left)
    known = [cost.seconds for cost in left if cost.seconds is not None]
    time = f", {duration(sum(known))} on this machine" if len(known) == len(left) else ""
    return f"{len(left)} cell{'s' * (len(left) != 1)}, about {forwards:,.0f} forward passes of one prompt{time}"


def estimates_table(title: str, costs: list[Estimate]) -> Table:
    """A table for the terminal, with the sums over the cells that are not done."""
    left = [cost for cost in costs if not cost.done]
    forwards, seconds = sum(cost.forwards for cost in left), sum(cost.seconds or 0 for cost in left)
    peak = max((cost.memory_gb or 0 for cost in left), default=0)
    table = Table("cell", "forwards", "time", "memory", "", title=escape(title), show_footer=True)
    footers = ("to do", f"{forwards:,.0f}", duration(seconds), f"{peak:.1f} GB", "")
    for column, footer in zip(table.columns, footers, strict=True):
        column.footer = footer
    for cost in costs:
        memory = "-" if cost.memory_gb is None else f"{cost.memory_gb:.1f} GB"
        table.add_row(
            escape(cost.cell.name), f"{cost.forwards:,.0f}", duration(cost.seconds), memory, escape(cost.note)
        )
    return table


def weights_gb(spec: ModelSpec) -> float | None:
    """GB of a model's weights, from its files or from the number in its name; None if neither tells."""
    path = Path(spec.where)
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if files:
        return sum(file.stat().st_size for file in files) / 1e9
    parameters = parameters_of(spec.where)
    return None if parameters is None else parameters * _BYTES[spec.dtype] / 1e9


def parameters_of(name: str) -> float | None:
    """The number of parameters according to a model's name: 7e9 for ``allenai/OLMo-7B-hf``."""
    if name in _KNOWN_SIZES:
        return _KNOWN_SIZES[name]
    size = re.search(r"(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", name.split("/")[-1].lower())
    return None if size is None else float(size[1]) * {"b": 1e9, "m": 1e6}[size[2]]


def _estimate(cell: Cell, folder: StudyFolder, timed: Callable[[Cell], ModelSpec | None], models: OneModel) -> Estimate:
    """The cost of a cell.

    Arguments:
        timed: called as timed(cell); the model that is timed for it. If there is none, the cost is guessed.
    """
    if folder.is_done(cell, folder.outcome(cell)):
        return Estimate(cell, 0, 0, None, "done", done=True)
    try:
        spec = timed(cell)
        measured = _guess(cell) if spec is None or not _is_here(spec) else _measure(cell, models(spec))
    except Exception as error:  # any error: the other cells are listed
        return Estimate(cell, 0, None, None, f"cannot run: {reason_of(error, folder.run_folder(cell))}")
    forwards = cell.job.forwards(cell.settings, measured.graph, measured.length)
    seconds = None if measured.seconds is None else forwards * measured.seconds
    memory = None if measured.weights_gb is None else measured.weights_gb + measured.runs_gb
    return Estimate(cell, forwards, seconds, memory, measured.note)


def _is_here(spec: ModelSpec) -> bool:
    """Whether a model can be loaded without a download."""
    from huggingface_hub import try_to_load_from_cache

    if spec.where in BUILT_IN or Path(spec.where).exists():
        return True
    return isinstance(try_to_load_from_cache(spec.where, "config.json"), str)


def _measure(cell: Cell, model: Model) -> Measurement:
    """The model's own shape, and the time of one forward pass of a few prompts of the task."""
    task = make_task(cell.where, model, n=_TIMED_PROMPTS, seed=0, **cell.task_options)
    tokens = cell.job.tokens(task)
    seconds = seconds_per_forward(model, tokens)
    weights, runs = cell.job.memory(model, cell.settings)
    return Measurement(Graph.of(model.anatomy), tokens.shape[1], seconds / len(tokens), weights, runs, "measured")


def _guess(cell: Cell) -> Measurement:
    """The shape of a usual model with this number of parameters."""
    parameters = parameters_of(cell.model.where)
    size = 12 if (parameters or 0) < 5e8 else 32  # layers, and heads in each
    seconds = None if parameters is None else 2 * parameters * _LENGTH / _speed()
    return Measurement(
        Graph(size, size, size),
        _LENGTH,
        seconds,
        weights_gb(cell.model),
        cell.settings.memory_gb,
        "guessed: the model is not on this machine",
    )


@cache
def _speed() -> float:
    """Floating-point operations that this machine does in a second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 1024
    matrix = torch.ones(size, size, device=device)
    (matrix @ matrix).sum().item()
    start = time.perf_counter()
    (matrix @ matrix).sum().item()
    return 2 * size**3 / (time.perf_counter() - start)

"""What a study will take: forwards, seconds and memory of each cell, before anything is run.

Forwards are those of one prompt. A forward and backward counts as two. Seconds come from one timed forward of the
model; of a model that is not on this machine, from its number of parameters and a timed matrix product.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from gatelens.gates import LEVELS
from gatelens.jobs.circuit import memory_estimate
from gatelens.jobs.study.cells import Cell, ModelSpec
from gatelens.jobs.study.file import Study
from gatelens.jobs.study.folder import StudyFolder
from gatelens.jobs.study.work import OneModel, reason
from gatelens.loading import BUILT_IN
from gatelens.measures.circuit_result import CircuitSettings
from gatelens.measures.roles_result import RolesSettings
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks import task as make_task
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import as_responses

BACKWARD = 2  # forwards that a forward and backward take, with frozen weights
LENGTH = 32  # tokens of a prompt, where none can be made
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """What the cost of a cell depends on."""

    heads: int  # in all layers
    edges: int  # of the component graph
    pairs: int  # attention edges of a prompt
    seconds: float  # for one forward of one prompt
    weights_gb: float
    runs_gb: float


@dataclass(frozen=True)
class Estimate:
    """The cost of one cell."""

    cell: Cell
    forwards: float
    seconds: float | None
    memory_gb: float | None
    note: str  # done already, measured, or how it was guessed


def estimates(study: Study, out: Path) -> list[Estimate]:
    """The cost of every cell; models that are on this machine are loaded, one after the other."""
    folder, models = StudyFolder(out), OneModel()
    return [_estimate(cell, folder, models) for cell in study.cells]


def estimates_table(study: Study, found: list[Estimate]) -> Table:
    """For the terminal, with the sums of what is still to do."""
    left = [one for one in found if one.note != "done"]
    table = Table("cell", "forwards", "time", "memory", "", title=escape(study.title), show_footer=True)
    sums = sum(one.forwards for one in left), sum(one.seconds or 0 for one in left)
    most = max((one.memory_gb or 0 for one in left), default=0)
    for column, footer in zip(
        table.columns, ("to do", f"{sums[0]:,.0f}", _span(sums[1]), f"{most:.1f} GB"), strict=False
    ):
        column.footer = footer
    for one in found:
        memory = "-" if one.memory_gb is None else f"{one.memory_gb:.1f} GB"
        table.add_row(escape(one.cell.name), f"{one.forwards:,.0f}", _span(one.seconds), memory, escape(one.note))
    return table


def weights_gb(spec: ModelSpec) -> float | None:
    """GB of a model's weights, without loading it: from its files, or from the number in its name. None: unknown."""
    place = Path(spec.where)
    files = [place] if place.is_file() else [*place.glob("*.safetensors"), *place.glob("*.bin")]
    if files:
        return sum(file.stat().st_size for file in files) / 1e9
    parameters = parameters_of(spec.where)
    return None if parameters is None else parameters * _BYTES[spec.dtype] / 1e9


def parameters_of(name: str) -> float | None:
    """The number of parameters that a model's name tells: 7e9 for ``allenai/OLMo-7B-hf``."""
    known = {**dict.fromkeys(BUILT_IN, 1.35e8), "gpt2": 1.24e8, "openai-community/gpt2": 1.24e8}
    if name in known:
        return known[name]
    found = re.search(r"(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", name.split("/")[-1].lower())
    return None if found is None else float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]]


def circuit_forwards(settings: CircuitSettings, shape: Shape) -> float:
    """Forwards of one prompt that a circuit cell takes: scores, curve, random curve, and the check on 8 prompts."""
    level, method = LEVELS[settings.level], settings.chosen_method
    n_gates = {"heads": shape.heads, "edges": shape.edges, "attention": shape.pairs}[level.name]
    scored = method.forwards(level, n_gates, settings.method_settings)
    n_points = len(level.grid(n_gates, settings.points))
    if settings.random_points:
        n_points += len(level.grid(n_gates, max(2, settings.random_points)))
    checked = 0.0
    if not method.exact and settings.sample:
        checked = (scored + level.cost.patch * min(settings.sample, n_gates)) * min(8, settings.n)
    per_prompt = scored + level.cost.circuit * n_points
    return settings.seeds * settings.n * per_prompt + settings.n * level.cost.circuit + checked


def gate_forwards(settings: RolesSettings) -> float:
    """Forwards of one prompt that a gate cell takes: three fits for each seed, and four ablation curves."""
    fitted = 3 * BACKWARD * settings.seeds * settings.updates * settings.batch * settings.accumulate
    points = len({*range(0, settings.most + 1, settings.every), settings.most})
    return fitted + 4 * 2 * points * settings.seeds * settings.held_out


def _estimate(cell: Cell, folder: StudyFolder, models: OneModel) -> Estimate:
    if folder.is_done(cell, folder.outcome(cell)):
        return Estimate(cell, 0, 0, None, "done")
    try:
        if _is_here(cell.model):
            shape, note = _measured(cell, models(cell.model)), "measured"
        else:
            shape, note = _guessed(cell), "guessed: the model is not on this machine"
    except Exception as error:  # whatever it is: the other cells are listed
        return Estimate(cell, 0, None, None, f"cannot run: {reason(error, folder.run_folder(cell))}")
    settings = cell.settings
    forwards = circuit_forwards(settings, shape) if isinstance(settings, CircuitSettings) else gate_forwards(settings)
    seconds = forwards * shape.seconds if shape.seconds else None
    memory = shape.weights_gb + shape.runs_gb if shape.weights_gb else None
    return Estimate(cell, forwards, seconds, memory, note)


def _is_here(spec: ModelSpec) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if spec.where in BUILT_IN or Path(spec.where).exists():
        return True
    return isinstance(try_to_load_from_cache(spec.where, "config.json"), str)


def _measured(cell: Cell, model: Model) -> Shape:
    """The model's own counts, and the time of one forward of up to four of the task's prompts."""
    tokens = _prompts(cell, model)
    times = []
    with torch.no_grad():
        for _ in range(2):  # the first warms up
            begun = time.perf_counter()
            model.hf(tokens)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    if isinstance(cell.settings, CircuitSettings):
        weights, runs = memory_estimate(model, cell.settings)
    else:
        weights, runs = memory_estimate(model, CircuitSettings())[0], cell.settings.memory_gb
    heads, length = model.n_layers * model.n_heads, tokens.shape[1]
    pairs = heads * length * (length + 1) // 2
    return Shape(heads, Graph.of(model.anatomy).n_edges, pairs, min(times) / len(tokens), weights, runs)


def _prompts(cell: Cell, model: Model) -> Any:
    task = make_task(cell.where, model, n=4, seed=0, **cell.whole_options)
    if isinstance(task, CircuitTask) and isinstance(cell.settings, CircuitSettings):
        return task.buckets[0].clean.to(model.device)
    batch = next(iter(as_responses(task).batches(4)))
    return batch.tokens.to(model.device)


def _guessed(cell: Cell) -> Shape:
    """Counts of a model of usual proportions with so many parameters."""
    parameters = parameters_of(cell.model.where)
    layers = 12 if (parameters or 0) < 5e8 else 32
    heads, sources = layers * layers, layers * (layers + 1) + 1
    pairs = heads * LENGTH * (LENGTH + 1) // 2
    weights = weights_gb(cell.model) or 0.0
    seconds = 2 * (parameters or 0) * LENGTH / _speed()
    return Shape(heads, 3 * sources * heads // 2, pairs, seconds, weights, cell.settings.memory_gb)


@cache
def _speed() -> float:
    """Multiplications and additions that this machine does in a second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 1024
    a = torch.ones(size, size, device=device)
    (a @ a).sum().item()
    begun = time.perf_counter()
    (a @ a).sum().item()
    return 2 * size**3 / (time.perf_counter() - begun)


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

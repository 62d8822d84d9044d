"""The jobs that a study can run, as registered values: a section of a study file has the name of a job.

To add a job, make a `Job` and add it to `JOBS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gatelens.jobs._task import Task
from gatelens.jobs.circuit import find_circuit
from gatelens.jobs.circuit_cost import circuit_forwards
from gatelens.jobs.circuit_memory import memory_estimate
from gatelens.jobs.roles import find_roles, roles_forwards
from gatelens.measures.areas import AreaColumns, area_columns
from gatelens.measures.circuit_result import CircuitResult, load_circuit, record_dense
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.counts import CountColumns
from gatelens.measures.roles_result import RolesResult, RolesSettings, load_roles
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.journal import Progress
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import as_responses


@dataclass(frozen=True)
class Finding:
    """What a study records of a finished run.

    Arguments:
        count: the count as columns of the summary. For roles: heads that facilitate in all seeds.
        shown: the count as it is printed, with its interval and the number of prompts.
        total: number of gates.
        seconds: how long the run took.
        sparse: whether the model's attention is gated.
        areas: CPR and CMD of a circuit.
    """

    count: CountColumns
    shown: str
    total: int
    seconds: float
    sparse: bool
    areas: AreaColumns = field(default_factory=AreaColumns)

    def columns(self) -> dict[str, Any]:
        """The same as fields of the state of a cell."""
        own = {"shown": self.shown, "total": self.total, "seconds": self.seconds, "sparse": self.sparse}
        return {**dict(self.count), **dict(self.areas), **own}


class RunJob(Protocol):
    """Runs a job in a folder, or resumes it there."""

    def __call__(
        self,
        model: Model,
        task: str,
        settings: Any,
        *,
        out: Path,
        options: Mapping[str, Any],
        dense: str | None,
        progress: Progress | None,
    ) -> Finding: ...


@dataclass(frozen=True)
class Job:
    """A job that a study can run.

    Arguments:
        kind: the name of its section in a study file.
        settings: the class of its settings. It has a field ``memory_gb``.
        task_kinds: the kinds of tasks that it accepts.
        level: called as level(settings); the beginning of the names of its cells.
        run: runs it, and returns what the study records.
        read: called as read(folder); what the study records of a run that is finished.
        forwards: called as forwards(settings, graph, length); its cost in forward passes of one prompt.
        priority: called as priority(settings). Of the cells of one model, those of a higher priority run first.
        memory: called as memory(model, settings); GB of the weights and GB of runs.
        tokens: called as tokens(task); a few prompts, to time a forward pass.
        columns: called as columns(settings); the columns ``method`` and ``threshold`` of the summary.
        load: called as load(folder, dense); the finished run, if its count can be compared between models.
        defaults: settings that have another default in a study than alone.
    """

    kind: str
    settings: type[Any]
    task_kinds: tuple[str, ...]
    level: Callable[[Any], str]
    run: RunJob
    read: Callable[[Path], Finding]
    forwards: Callable[[Any, Graph, int], float]
    priority: Callable[[Any], float]
    memory: Callable[[Model, Any], tuple[float, float]]
    tokens: Callable[[Task], Tensor]
    columns: Callable[[Any], dict[str, Any]]
    load: Callable[[Path, str | None], CircuitResult] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Circuits


def _run_circuit(
    model: Model,
    task: str,
    settings: CircuitSettings,
    *,
    out: Path,
    options: Mapping[str, Any],
    dense: str | None,
    progress: Progress | None,
) -> Finding:
    return _circuit_finding(
        find_circuit(model, task, settings, out=out, options=options, dense=dense, progress=progress)
    )


def _circuit_finding(result: CircuitResult) -> Finding:
    areas = area_columns(result.curve.cpr, result.curve.cmd)
    count = result.count
    return Finding(count.columns(), str(count), result.curve.total, result.seconds, result.sparse, areas)


def _load_circuit(folder: Path, dense: str | None) -> CircuitResult:
    record_dense(folder, dense)  # the study may name another dense model after the circuit was found
    return load_circuit(folder)


def _circuit_tokens(task: Task) -> Tensor:
    return task.buckets[0].clean if isinstance(task, CircuitTask) else _response_tokens(task)


# Head roles


def _run_roles(
    model: Model,
    task: str,
    settings: RolesSettings,
    *,
    out: Path,
    options: Mapping[str, Any],
    dense: str | None,
    progress: Progress | None,
) -> Finding:
    return _roles_finding(find_roles(model, task, settings, out=out, options=options, progress=progress))


def _roles_finding(result: RolesResult) -> Finding:
    n_heads = result.roles.gates[0].numel()
    facilitating = round(result.roles.summary()["facilitation"]["all seeds"] * n_heads)
    seeds = len(result.roles.gates)
    shown = f"{facilitating} in all {seeds} seeds" if seeds > 1 else f"{facilitating} in 1 seed"
    n = result.settings.n
    columns = CountColumns(count=facilitating, prompts=n, seeds=seeds)
    return Finding(columns, f"{shown} ({n} examples)", n_heads, result.seconds, result.sparse)


def _roles_memory(model: Model, settings: RolesSettings) -> tuple[float, float]:
    weights, _ = memory_estimate(model, CircuitSettings())
    return weights, settings.memory_gb


def _response_tokens(task: Task) -> Tensor:
    tokens: Tensor = next(iter(as_responses(task).batches(4))).tokens
    return tokens


JOBS: dict[str, Job] = {
    "circuit": Job(
        kind="circuit",
        settings=CircuitSettings,
        task_kinds=("circuit",),
        level=lambda settings: str(settings.level),
        run=_run_circuit,
        read=lambda folder: _circuit_finding(load_circuit(folder)),
        forwards=circuit_forwards,
        priority=lambda settings: 0.0,
        memory=memory_estimate,
        tokens=_circuit_tokens,
        columns=lambda settings: {"method": settings.method, "threshold": settings.threshold},
        load=_load_circuit,
        defaults={"held_out": True},
    ),
    "gate": Job(
        kind="gate",
        settings=RolesSettings,
        task_kinds=("circuit", "response"),
        level=lambda settings: "roles",
        run=_run_roles,
        read=lambda folder: _roles_finding(load_roles(folder)),
        forwards=lambda settings, graph, length: roles_forwards(settings),
        priority=roles_forwards,
        memory=_roles_memory,
        tokens=_response_tokens,
        columns=lambda settings: {"method": "head gating", "threshold": None},
    ),
}
"""The jobs by their kind, in the order in which a study lists its cells."""

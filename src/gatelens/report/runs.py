"""The saved runs of some folders: what can be read, and one sentence for each that cannot."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.jobs.circuit import CircuitResult, load_circuit
from gatelens.jobs.roles import GateResult, load_roles
from gatelens.measures.curves import Curve
from gatelens.measures.example import ExamplePrompt, load_example
from gatelens.measures.results import ASKED, RESULT
from gatelens.model.graph import Graph
from gatelens.runtime.files import read_json, read_tensors

_UNREADABLE = (ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError, OSError)


@dataclass(frozen=True, eq=False)
class CircuitRun:
    """A circuit with all that was saved beside it."""

    folder: Path
    asked: Mapping[str, Any]
    result: CircuitResult
    sparse: bool  # whether the model's attention is gated
    graph: Graph | None  # None: saved by an earlier version
    scores: Mapping[str, Tensor]  # as in scores.safetensors
    prompts: list[ExamplePrompt]

    @property
    def edge_scores(self) -> Tensor:
        """The first task seed's scores: (source, destination)."""
        return self.scores[f"seed-{self.result.settings.seed}.scores"]

    @property
    def head_scores(self) -> Tensor | None:
        """(layer, head), mean over prompts and task seeds; of attention edges, the sum over a head's."""
        level = self.result.settings.level
        if level == "heads":
            return sum(self.scores.values()) / len(self.scores)  # type: ignore[return-value]
        if level == "attention":
            sums = [x.sum((3, 4)) for name, x in self.scores.items() if name.endswith(".scores")]
            return sum(x.sum(0) for x in sums) / sum(map(len, sums))  # type: ignore[return-value]
        return None


@dataclass(frozen=True, eq=False)
class GateRun:
    """Head roles."""

    folder: Path
    asked: Mapping[str, Any]
    result: GateResult
    sparse: bool


@dataclass(frozen=True, eq=False)
class SparsifyRun:
    """What a sparse post-training measured; it may still be under way."""

    folder: Path
    asked: Mapping[str, Any]
    log: list[dict[str, float]]  # every step
    judged: list[dict[str, float]]  # held-out text, every so often

    @property
    def name(self) -> str:
        return "/".join(self.folder.resolve().parts[-2:])


Run = CircuitRun | GateRun | SparsifyRun
R = TypeVar("R", CircuitRun, GateRun)


@dataclass(frozen=True)
class Runs:
    """All runs that could be read, in the order of their folders, and what is wrong with the others."""

    circuits: list[CircuitRun] = field(default_factory=list)
    gates: list[GateRun] = field(default_factory=list)
    sparsified: list[SparsifyRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one sentence each

    @property
    def all(self) -> list[Run]:
        return [*self.circuits, *self.gates, *self.sparsified]


def read_runs(folders: Iterable[str | Path]) -> Runs:
    """Read every run in these folders: each is a run's folder, or holds such folders at any depth."""
    runs = Runs()
    seen: set[Path] = set()
    for given in map(Path, folders):
        found = run_folders(given)
        if not found:
            there = "holds no run of gatelens" if given.is_dir() else "is no folder"
            runs.problems.append(f"{given} {there}: give the folder that a circuit, gate or sparsify run wrote.")
        for folder in found:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                _read(folder, runs)
    return runs


def run_folders(folder: Path) -> list[Path]:
    """The folders of runs in this folder, which may be one itself; links are not followed."""
    found: list[Path] = []
    for place, below, files in os.walk(folder):
        below.sort()
        if ASKED in files or {"settings.json", "log.csv"} <= set(files):
            found.append(Path(place))
            below.clear()  # a run holds no other runs
    return found


def _read(folder: Path, runs: Runs) -> None:
    try:
        if not (folder / ASKED).exists():
            runs.sparsified.append(_sparsify_run(folder))
            return
        asked = read_json(folder / ASKED)
        kind = asked.get("kind")
        if kind not in _READERS:
            raise GatelensError(f"{folder} holds a run of the kind {kind!r}, which has no place in a report.")
        if not (folder / RESULT).exists():
            raise GatelensError(f"{folder} holds a run that is not complete: the same command continues it.")
        run = _READERS[kind](folder, asked)
        (runs.circuits if isinstance(run, CircuitRun) else runs.gates).append(run)  # type: ignore[arg-type]
    except GatelensError as error:
        runs.problems.append(str(error))
    except _UNREADABLE as error:  # plausible files with something else in them
        what = " ".join(str(error).split())[:200]
        runs.problems.append(f"{folder} cannot be read ({type(error).__name__}: {what}): run it again.")


def _circuit_run(folder: Path, asked: dict[str, Any]) -> CircuitRun:
    about = read_json(folder / RESULT)
    result = load_circuit(folder)
    graph = Graph(**about["graph"]) if "graph" in about else None
    scores = read_tensors(folder / "scores.safetensors")
    run = CircuitRun(folder, asked, result, _is_sparse(about), graph, scores, load_example(folder))
    # What is drawn is looked at once here, so that a damaged run is left out as a whole.
    _check_names(folder, result.model, result.task)
    for curve in (result.curve, result.curve.random):
        if curve is not None:
            _check_curve(folder, curve, result.settings.level)
    if any(not bool(x.isfinite().all()) for x in scores.values()):
        raise GatelensError(f"{folder} holds scores that cannot be drawn: run it again.")
    if result.settings.level != "edges":
        _check_head_map(folder, run.head_scores)
    elif graph is not None and run.edge_scores.shape != graph.edges.shape:
        raise GatelensError(f"{folder} holds scores of another model than its {graph.n_layers} layers: run it again.")
    heads = None if graph is None else (graph.n_layers, graph.n_heads)
    if heads is not None and any(tuple(prompt.attention.shape[:2]) != heads for prompt in run.prompts):
        raise GatelensError(f"{folder} holds attention of another model than its {heads[0]} layers: run it again.")
    return run


def _gate_run(folder: Path, asked: dict[str, Any]) -> GateRun:
    result = load_roles(folder)
    _check_names(folder, result.model, result.task)
    _check_head_map(folder, result.roles.plus.mean(0))
    for curve in result.curves:
        own = [] if curve.own is None else [curve.own]
        fits = curve.changes.shape[1:] == curve.ablated.shape and all(x.shape == curve.changes.shape[:1] for x in own)
        if not fits or not all(bool(x.isfinite().all()) for x in (curve.changes, *own)):
            raise GatelensError(f"{folder} holds ablations that cannot be drawn: run it again.")
    return GateRun(folder, asked, result, _is_sparse(read_json(folder / RESULT)))


def _sparsify_run(folder: Path) -> SparsifyRun:
    asked = read_json(folder / "settings.json")
    if not isinstance(asked.get("settings"), dict):
        raise GatelensError(f"{folder / 'settings.json'} is not of gatelens: it should hold the settings of a run.")
    log = _rows(folder / "log.csv")
    if not log:
        raise GatelensError(f"{folder} holds a run that has made no step yet.")
    if not {"step", "constrained", "open", "multiplier"} <= log[0].keys():
        raise GatelensError(f"{folder / 'log.csv'} is not of gatelens: it should hold the steps of a sparsify run.")
    return SparsifyRun(folder, asked, log, _rows(folder / "judged.csv") if (folder / "judged.csv").exists() else [])


_READERS: dict[Any, Callable[[Path, dict[str, Any]], CircuitRun | GateRun]] = {
    "circuit": _circuit_run,
    "gate": _gate_run,
}


def _rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        # A run that was killed leaves half a line.
        rows = [row for row in csv.DictReader(file) if None not in row and None not in row.values()]
    # A cell is empty where a text was judged later, or no more.
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def _is_sparse(about: Mapping[str, Any]) -> bool:
    """Earlier versions did not say: there the name must do."""
    return bool(about.get("sparse", "sparse" in str(about.get("model"))))


def _check_names(folder: Path, *names: object) -> None:
    if not all(isinstance(name, str) for name in names):
        raise GatelensError(f"{folder} does not name its model and task: run it again.")


def _check_curve(folder: Path, curve: Curve, level: str) -> None:
    points = (len(curve.asked), *curve.kept.shape, curve.metrics.shape[1])
    numbers = (curve.effect, curve.low, curve.high)
    if curve.level != level or len({*points}) != 1 or any(not bool(x.isfinite().all()) for x in numbers):
        raise GatelensError(f"{folder} holds a curve that cannot be drawn: run it again.")


def _check_head_map(folder: Path, scores: Tensor | None) -> None:
    if scores is None or scores.ndim != 2 or not bool(scores.isfinite().all()):
        raise GatelensError(f"{folder} holds no score for each layer and head: run it again.")


def labels(runs: Sequence[R]) -> dict[str, R]:
    """Runs by the names of their models, with the folder's name where two of them share one."""
    names = [run.result.model for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    found: dict[str, R] = {}
    for name, run in zip(names, runs, strict=True):
        label, parts = name, run.folder.resolve().parts
        for depth in range(1, len(parts) + 1):  # as much of the path as tells them apart
            if label in found or (depth == 1 and name in twice):
                label = f"{name} ({'/'.join(parts[-depth:])})"
        found[label] = run
    return found

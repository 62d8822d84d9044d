"""Read the saved runs in some folders. A run that cannot be read is reported in one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError, shortened
from gatelens.gates import EDGES, LEVELS
from gatelens.gates.scores import Scores
from gatelens.measures.circuit_result import BEST_SCORES, SCORES, CircuitResult, load_circuit, load_scores
from gatelens.measures.curves import Curve
from gatelens.measures.example import load_example
from gatelens.measures.roles_result import load_roles
from gatelens.report._runs import CircuitRun, RolesRun, Runs, SparsifyRun
from gatelens.runtime.files import read_json, read_numbers
from gatelens.runtime.inputs import usable_path
from gatelens.runtime.run_folder import ASKED, RESULT


def read_runs(folders: Iterable[str | Path]) -> Runs:
    """Read every run in these folders. Each of them is a run folder, or contains run folders at any depth."""
    runs = Runs()
    seen: set[Path] = set()
    for given in map(usable_path, folders):
        inside = run_folders(given)
        if not inside:
            problem = "does not contain a run of gatelens" if given.is_dir() else "is not a folder"
            runs.problems.append(f"{given} {problem}: give the folder of a circuit, gate or sparsify run.")
        for folder in inside:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                _read(folder, runs)
    return runs


def run_folders(folder: Path) -> list[Path]:
    """The run folders inside a folder, or the folder itself if it is one. Links are not followed."""
    inside: list[Path] = []
    for place, below, files in os.walk(folder):
        below.sort()
        if ASKED in files or {"settings.json", "log.csv"} <= set(files):
            inside.append(Path(place))
            below.clear()  # a run does not contain other runs
    return inside


def _read(folder: Path, runs: Runs) -> None:
    """Read one run and add it, or the reason why it cannot be read."""
    try:
        if not (folder / ASKED).exists():
            runs.sparsified.append(sparsify_run(folder))
            return
        asked = read_json(folder / ASKED)
        kind = asked.get("kind")
        if kind not in ("circuit", "gate"):
            raise GatelensError(f"{folder} holds a run of the kind {kind!r}, which a report does not show.")
        if not (folder / RESULT).exists():
            raise GatelensError(f"{folder} holds a run that is not complete: the same command resumes it.")
        if kind == "circuit":
            runs.circuits.append(_circuit_run(folder, asked))
        else:
            runs.roles.append(_roles_run(folder, asked))
    except GatelensError as error:
        runs.problems.append(str(error))
    except Exception as error:  # a damaged file can raise errors of any type
        message = shortened(" ".join(str(error).split()))
        runs.problems.append(f"cannot read {folder} ({type(error).__name__}: {message}): run the job again.")


def _circuit_run(folder: Path, asked: dict[str, Any]) -> CircuitRun:
    result = load_circuit(folder)
    run = CircuitRun(folder, asked, result, _scores(folder, result), load_example(folder))
    # Everything that is drawn is checked here, so that a damaged run is left out as a whole.
    for curve in (result.curve, result.curve.random):
        if curve is not None:
            _check_curve(folder, curve, result.settings.level)
    _check_scores(run)
    heads = None if result.graph is None else (result.graph.n_layers, result.graph.n_heads)
    if heads is not None and any(tuple(prompt.attention.shape[:2]) != heads for prompt in run.prompts):
        raise GatelensError(
            f"{folder} holds the attention of another model, whose shape is not {heads[0]} layers of {heads[1]} heads: "
            "run the job again."
        )
    return run


def _scores(folder: Path, result: CircuitResult) -> list[Scores]:
    """The scores of all gates, or of the best ones. Folders of earlier versions may lack those of attention edges."""
    level = LEVELS[result.settings.level]
    is_missing = not level.shared and not any((folder / name).exists() for name in (SCORES, BEST_SCORES))
    if is_missing or (result.graph is None and level is EDGES):  # gatelens 0.1 did not always save the graph
        return []
    return load_scores(folder, result.settings, result.graph, compact=True)


def _roles_run(folder: Path, asked: dict[str, Any]) -> RolesRun:
    result = load_roles(folder)
    _check_head_map(folder, result.roles.plus.mean(0))
    for curve in result.curves:
        own = [] if curve.own is None else [curve.own]
        fits = curve.changes.shape[1:] == curve.ablated.shape and all(x.shape == curve.changes.shape[:1] for x in own)
        if not fits or not all(bool(x.isfinite().all()) for x in (curve.changes, *own)):
            raise GatelensError(f"{folder} holds ablation curves that cannot be drawn: run the job again.")
    return RolesRun(folder, asked, result)


def sparsify_run(folder: Path) -> SparsifyRun:
    """A run of sparse post-training, finished or not."""
    asked = read_json(folder / "settings.json")
    if not isinstance(asked.get("settings"), dict):
        raise GatelensError(f"{folder / 'settings.json'} was not written by gatelens: it has no settings of a run.")
    log = read_numbers(folder / "log.csv")[1]
    if not log:
        raise GatelensError(f"{folder} holds a run that has not made a step yet.")
    if not {"step", "loss", "open", "multiplier"} <= log[0].keys():
        raise GatelensError(f"{folder / 'log.csv'} was not written by gatelens: it is not the log of a sparsify run.")
    judged = folder / "judged.csv"
    return SparsifyRun(folder, asked, log, read_numbers(judged)[1] if judged.exists() else [])


def _check_curve(folder: Path, curve: Curve, level: str) -> None:
    points = (len(curve.asked), *curve.kept.shape, curve.metrics.shape[1])
    numbers = (curve.effect, curve.low, curve.high)
    if curve.level != level or len({*points}) != 1 or any(not bool(x.isfinite().all()) for x in numbers):
        raise GatelensError(f"{folder} holds a curve that cannot be drawn: run the job again.")


def _check_scores(run: CircuitRun) -> None:
    saved = [tensor for scores in run.scores for tensor in scores.tensors().values()]
    if any(not bool(tensor.isfinite().all()) for tensor in saved):
        raise GatelensError(f"{run.folder} holds scores that cannot be drawn: run the job again.")
    if run.scores and LEVELS[run.result.settings.level].head_map:
        _check_head_map(run.folder, run.head_scores)
    elif run.has_graph and run.edge_scores.shape != run.edge_graph.edges.shape:
        raise GatelensError(
            f"{run.folder} holds the scores of another model, which does not have {run.edge_graph.n_layers} layers: "
            "run the job again."
        )


def _check_head_map(folder: Path, scores: Tensor | None) -> None:
    if scores is None or scores.ndim != 2 or not bool(scores.isfinite().all()):
        raise GatelensError(f"{folder} does not hold a score for each layer and head: run the job again.")

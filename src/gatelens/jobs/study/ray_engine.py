"""Run a study's cells as Ray tasks, on a Ray of this machine or on an existing cluster.

Ray schedules, restarts and moves the work; a cell itself is run by the same `run_cell` as on one machine. The study's
folder, and the models that are folders, must be seen under the same path by every machine of the cluster. A worker that
dies takes with it only the piece its cell was at: Ray starts the cell again, and its folder continues.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatelens.errors import GatelensError
from gatelens.jobs.study.cells import Cell
from gatelens.jobs.study.cost import weights_gb
from gatelens.jobs.study.file import Study
from gatelens.jobs.study.folder import Outcome, StudyFolder
from gatelens.jobs.study.work import OneModel, run_cell

if TYPE_CHECKING:
    from gatelens.jobs.study.run import Display

RETRIES = 3  # of a cell whose worker dies
_models = OneModel()  # of a worker: Ray gives it one cell after the other


def check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise GatelensError("the engine ray needs Ray: run `pip install 'gatelens[ray]'`, or take --engine local.")


def run_on_ray(study: Study, folder: StudyFolder, display: Display, address: str | None) -> dict[str, Outcome]:
    """All cells that are not done, on Ray's workers."""
    outcomes: dict[str, Outcome] = {}
    left: list[Cell] = []
    for cell in study.cells:
        before = folder.outcome(cell)
        if folder.is_done(cell, before):
            outcomes[cell.name] = before
            display.ended(before)
        else:
            left.append(cell)
    if left:
        ray = _connect(address)
        try:
            _run_all(ray, left, folder, display, outcomes)
        finally:
            ray.shutdown()
    return outcomes


def _connect(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    import ray

    if ray.is_initialized():
        raise GatelensError("this process is connected to Ray already: call ray.shutdown() first.")
    try:
        ray.init(address=address or "local", include_dashboard=None if address else False, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = f"the cluster at {address}" if address else "a Ray of this machine"
        said = " ".join(str(error).split()).rstrip(".")
        raise GatelensError(f"cannot reach {where} ({said}): check --address, or take --engine local.") from error
    return ray


def _run_all(ray: Any, cells: list[Cell], folder: StudyFolder, display: Display, outcomes: dict[str, Outcome]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    running: dict[Any, Cell] = {}
    for cell in cells:
        needs = resources(cell, any(node.get("GPU") for node in nodes))
        if (lack := too_much(needs, nodes)) is not None:
            outcomes[cell.name] = Outcome(cell.name, "failed", reason=lack)
            display.ended(outcomes[cell.name])
            continue
        # Not by `options` alone: a worker with a GPU is to end with its cell, which Ray decides here.
        task = ray.remote(max_retries=RETRIES, **needs)(run_in_worker).options(name=cell.name)
        running[task.remote(cell, str(folder.out))] = cell
    while running:
        display.at(f"on Ray: {', '.join(cell.name for cell in list(running.values())[:3])}")
        (ready, *_), _ = ray.wait(list(running), num_returns=1)
        cell = running.pop(ready)
        try:
            outcome = ray.get(ready)
        except ray.exceptions.RayError as error:
            said = " ".join(str(error).split())[:300]
            outcome = Outcome(cell.name, "failed", reason=f"its worker died {RETRIES + 1} times or was lost: {said}")
        outcomes[cell.name] = outcome
        display.ended(outcome)


def run_in_worker(cell: Cell, out: str) -> Outcome:
    """What a Ray worker does with a cell; if a process outside of Ray is at it, wait for that."""
    outcome = run_cell(cell, Path(out), _models, wait=True)
    assert outcome is not None  # it waited
    return outcome


def resources(cell: Cell, gpus: bool) -> dict[str, float]:
    """What Ray is to keep free for a cell: cores, GPUs, and memory for weights and runs."""
    spec = cell.model
    wanted = spec.gpus if spec.gpus is not None else float(gpus and spec.device in (None, "cuda"))
    needs: dict[str, float] = {"num_cpus": spec.cpus, "num_gpus": wanted}
    weights = weights_gb(spec)
    if weights is not None:
        needs["memory"] = int((weights + (0 if wanted else cell.settings.memory_gb)) * 1e9)
    return needs


def too_much(needs: dict[str, float], nodes: list[dict[str, float]]) -> str | None:
    """A sentence if no machine of the cluster has what a cell needs: Ray would wait for it forever."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    if any(all(node.get(names[key], 0) >= value for key, value in needs.items()) for node in nodes):
        return None
    asked = f"{needs['num_cpus']:g} CPUs, {needs['num_gpus']:g} GPUs and {needs.get('memory', 0) / 1e9:.1f} GB"
    return f"no machine of the cluster has the {asked} that it needs: ask for less (cpus, gpus, memory_gb), or add one."

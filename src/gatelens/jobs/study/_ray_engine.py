"""Run the cells of a study as Ray tasks, on this machine or on an existing cluster.

Ray schedules, restarts and moves the work; a cell itself is run by the same `run_cell` as on one machine. All machines
of the cluster must see the folder of the study, and models that are folders, under the same path. If a worker dies,
only the current piece of its cell is lost: Ray starts the cell again, and it resumes from its folder.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatelens.errors import GatelensError
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._folder import Outcome, StudyFolder
from gatelens.jobs.study._work import OneModel, run_cell
from gatelens.jobs.study.cost import weights_gb
from gatelens.jobs.study.file import Study

if TYPE_CHECKING:
    from gatelens.jobs.study.run import Display

RETRIES = 3  # of a cell whose worker dies
_models = OneModel()  # of a worker, which Ray gives one cell after the other


def check_ray() -> None:
    """Raise an error if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise GatelensError("the engine ray needs Ray: run `pip install 'gatelens[ray]'`, or use --engine local.")


def run_on_ray(
    study: Study, cells: Sequence[Cell], folder: StudyFolder, display: Display, address: str | None
) -> dict[str, Outcome]:
    """Run those of these cells that are not done on Ray's workers."""
    outcomes: dict[str, Outcome] = {}
    left: list[Cell] = []
    for cell in cells:
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
    import ray

    if ray.is_initialized():
        raise GatelensError("this process is already connected to Ray: call ray.shutdown() first.")
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray replaces it by one that exits without a word
    try:
        ray.init(address=address or "local", include_dashboard=None if address else False, log_to_driver=False)
    except Exception as error:  # Ray raises errors without a type of their own, such as if its processes start slowly
        where = f"connect to the cluster at {address}" if address else "start Ray on this machine"
        message = " ".join(str(error).split()).rstrip(".")
        raise GatelensError(f"cannot {where} ({message}): check --address, or use --engine local.") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
    return ray


def _run_all(ray: Any, cells: list[Cell], folder: StudyFolder, display: Display, outcomes: dict[str, Outcome]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    running: dict[Any, Cell] = {}
    for cell in cells:
        needs = resources(cell, any(node.get("GPU") for node in nodes))
        if (lack := too_much(needs, nodes)) is not None:
            outcomes[cell.name] = Outcome.new(cell.name, "failed", reason=lack)
            display.ended(outcomes[cell.name])
            continue
        # Resources are given to `remote` and not to `options`: Ray then ends a worker with a GPU after its cell.
        task = ray.remote(max_retries=RETRIES, **needs)(run_in_worker).options(name=cell.name)
        running[task.remote(cell, str(folder.out))] = cell
    while running:
        display.at(f"on Ray: {', '.join(cell.name for cell in list(running.values())[:3])}")
        (ready, *_), _ = ray.wait(list(running), num_returns=1)
        cell = running.pop(ready)
        try:
            outcome = ray.get(ready)
        except ray.exceptions.RayError as error:
            message = " ".join(str(error).split())[:300]
            reason = f"its worker died {RETRIES + 1} times or was lost: {message}"
            outcome = Outcome.new(cell.name, "failed", reason=reason)
        outcomes[cell.name] = outcome
        display.ended(outcome)


def run_in_worker(cell: Cell, out: str) -> Outcome:
    """Run a cell in a Ray worker. If a process outside of Ray works on it, wait for that process."""
    outcome = run_cell(cell, Path(out), _models, wait=True)
    assert outcome is not None  # because it waited
    return outcome


def resources(cell: Cell, gpus: bool) -> dict[str, float]:
    """What Ray reserves for a cell: cores, GPUs, and memory for weights and runs.

    Arguments:
        gpus: whether the cluster has any GPU.
    """
    spec = cell.model
    n_gpus = spec.gpus if spec.gpus is not None else float(gpus and spec.device in (None, "cuda"))
    needs: dict[str, float] = {"num_cpus": spec.cpus, "num_gpus": n_gpus}
    weights = weights_gb(spec)
    if weights is not None:
        needs["memory"] = int((weights + (0 if n_gpus else cell.settings.memory_gb)) * 1e9)
    return needs


def too_much(needs: dict[str, float], nodes: list[dict[str, float]]) -> str | None:
    """A sentence if no machine of the cluster has what a cell needs; Ray would wait for such a machine forever."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    if any(all(node.get(names[key], 0) >= value for key, value in needs.items()) for node in nodes):
        return None
    amounts = f"{needs['num_cpus']:g} CPUs, {needs['num_gpus']:g} GPUs and {needs.get('memory', 0) / 1e9:.1f} GB"
    return (
        f"no machine of the cluster has the {amounts} that this cell needs: ask for less (cpus, gpus, memory_gb), or "
        "add a machine."
    )

"""Studies of tiny models: a second each."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from families import tiny
from filelock import FileLock

from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._folder import Outcome
from gatelens.jobs.study._ray_engine import run_in_worker
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import Display, run_study
from gatelens.jobs.study.summary import Summary
from gatelens.report import page
from gatelens.runtime.journal import Journal
from gatelens.sparse.in_model import make_sparse, save_sparse

CIRCUIT = """\
tasks = "induction"
n = 4
steps = 2
points = 6
random_points = 3
refine = 0
sample = 0
allow_noise = true
"""
GATE = """\
tasks = "induction"
models = ["dense"]
seeds = 2
updates = 26
batch = 4
n = 4
held_out = 2
most = 4
every = 2
"""
LENGTH = "[{}.task.induction]\noptions = {{ length = 4 }}"

LEVELS = 'level = ["heads", "edges"]'  # for write_study: a study of two levels


def save_models(folder: Path) -> None:
    """Two model folders, ``dense`` and ``sparse``."""
    for name in ("dense", "sparse"):
        model = tiny("llama")
        if name == "sparse":
            make_sparse(model.hf, 0.1)
            save_sparse(model.hf, folder / name)
        else:
            model.hf.save_pretrained(folder / name)
        model.tokenizer.save_pretrained(folder / name)


def study_text(circuit: str = "", gate: bool = False, models: str = "") -> str:
    """A study of both models; ``circuit``: more settings."""
    parts = ['title = "Tiny"', "[models]", 'dense = "dense"', 'sparse = "sparse"', models]
    parts += ["[circuit]", CIRCUIT, circuit, LENGTH.format("circuit")]
    if gate:
        parts += ["[gate]", GATE, LENGTH.format("gate")]
    return "\n".join(parts)


def write_study(folder: Path, **about: Any) -> Path:
    (folder / "tiny.toml").write_text(study_text(**about))
    return folder / "tiny.toml"


def numbers(out: Path) -> dict[str, Any]:
    """The results of a study, cell by cell: everything except times."""
    results: dict[str, Any] = {}
    for folder in sorted((out / "cells").iterdir()):
        results[folder.name] = json.loads((folder / "result.json").read_text()) | {"seconds": None}
        for path in folder.glob("*.csv"):
            results[f"{folder.name}/{path.name}"] = path.read_text()
        for path in folder.glob("*.safetensors"):
            results[f"{folder.name}/{path.name}"] = path.read_bytes()
    return results


def run_alone(file: Path, out: Path) -> None:
    """Run a study in a process of its own, without a report, and on one core so that sums have the same order."""
    torch.set_num_threads(1)
    sys.exit(run_study(read_study(file), out).failed)


def die_at(cell: str, died: Path | None = None) -> None:
    """Kill this process when it has saved a piece of this cell.

    Arguments:
        died: a file to write the number of the process to before.
    """
    keep = Journal.keep

    def keep_and_die(self: Journal, name: str, tensors: Any) -> None:
        keep(self, name, tensors)
        if cell in str(self.folder):
            if died is not None:
                died.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.keep = keep_and_die  # type: ignore[method-assign]


def run_until_killed(file: Path, out: Path, cell: str) -> None:
    """`run_alone`, until a piece of this cell is saved."""
    die_at(cell)
    run_alone(file, out)


def run_in_worker_that_dies(cell: Cell, out: str) -> Outcome:
    """`run_in_worker` for Ray. The first worker that saves a piece of a cell of edges is killed."""
    died = Path(out).parent / "died"
    if cell.name == "edges-induction-dense" and not died.exists():
        die_at(cell.name, died)
    return run_in_worker(cell, out)


def run_and_say_when_waiting(file: Path, out: Path, waits: Any) -> None:
    """`run_alone`, which sets an event when it waits for a cell of another process."""
    at = Display.at

    def say(self: Display, title: str) -> None:
        at(self, title)
        if title.startswith("waiting for another process"):
            waits.set()

    Display.at = say  # type: ignore[method-assign]
    run_alone(file, out)


def hold(lock: Path, held: Any) -> None:
    """Hold a cell's lock until killed."""
    with FileLock(lock):
        held.set()
        signal.pause()


def go(file: Path, out: Path) -> Summary:
    """Run the study of a file with its report."""
    return run_study(read_study(file), out, write_report=page.write_report)

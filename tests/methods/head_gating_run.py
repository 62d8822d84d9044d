"""Head gating for tests to start as several processes: accelerate launch ... head_gating_run.py OUT MODEL."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from copying import copying_model, copying_task

from gatelens import HeadGatingSettings, Model, fit_head_gates
from gatelens.cli import make_app
from gatelens.gates.roles import HeadRoles
from gatelens.measures.ablation import ablation_curve
from gatelens.runtime.context import Context
from gatelens.runtime.files import write_tensors
from gatelens.runtime.journal import StateSaver
from gatelens.runtime.processes import Processes

SETTINGS = HeadGatingSettings(seeds=3, updates=6, batch=4)
ONE_SEED = HeadGatingSettings(seeds=1, updates=2, batch=4)
STOP = (2, 4)  # updates of G+ and G- after which each process stops
GATE = ["--seeds", "3", "--updates", "2", "--batch", "4", "--n", "4", "--held-out", "3", "--most", "2"]


class Stop(Exception):
    pass


def model() -> Model:
    """A double precision model: Adam turns the rounding error of a gradient near 0 into a step."""
    made = copying_model()
    made.hf.double()
    return made


def stop_at(folder: Path, update: int) -> Context:
    def stop(title: str, done: int, total: int) -> None:
        if "G+" in title and done == update:
            raise Stop

    return Context.in_folder(folder, progress=stop)


def tensors(roles: HeadRoles) -> dict[str, torch.Tensor]:
    return {name: getattr(roles, name) for name in ("gates", "plus", "minus", "losses")}


def main(out: Path, folder: str) -> None:
    ours, task = model(), copying_task(8)
    processes = Processes(ours.device)
    (out / f"share-{processes.index}.json").write_text(json.dumps(processes.share(3)))
    # The processes stop after different updates, and then resume.
    StateSaver.STEPS = 1
    with suppress(Stop):
        fit_head_gates(ours, task, SETTINGS, context=stop_at(out / "pieces", STOP[processes.index]))
    processes.wait()
    if processes.index == 0:
        shutil.copytree(out / "pieces", out / "stopped")
    processes.wait()
    roles = fit_head_gates(ours, task, SETTINGS, context=Context.in_folder(out / "pieces"))
    curve = ablation_curve(ours, task, roles, most=3, batch=3, context=Context.in_folder(out / "pieces"))
    few = fit_head_gates(ours, task, ONE_SEED)
    write_tensors(
        out / f"found-{processes.index}.safetensors",
        {**tensors(roles), "changes": curve.changes, "one seed": few.minus},
    )
    command = ["gate", folder, "induction", "--out", str(out / "run"), *GATE]
    make_app("gate")(args=command, standalone_mode=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])

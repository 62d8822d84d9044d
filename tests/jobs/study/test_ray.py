"""Studies on a real Ray of this machine: the same numbers as without it, also when a worker is killed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import studies
import torch
from studies import numbers, write_study

from gatelens import GatelensError
from gatelens.jobs.study import _ray_engine
from gatelens.jobs.study._ray_engine import resources, too_much
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.models import ModelSpec
from gatelens.jobs.study.run import run_study

cloudpickle = pytest.importorskip("ray.cloudpickle", reason="Ray is not installed: pip install 'gatelens[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("no_report"),
]


def test_a_killed_worker_loses_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers at two cells; one is killed in the middle of its own. Ray runs that cell again, and it continues."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = write_study(place, circuit='level = ["heads", "edges"]\npoints = 40\nmemory_gb = 0.0001')
    text = file.read_text().replace("points = 6\n", "")
    file.write_text(
        text.replace('"dense"', '{ load = "dense", cpus = 0.5 }').replace('"sparse"', '{ load = "sparse" }')
    )
    monkeypatch.setattr(_ray_engine, "run_in_worker", studies.run_in_worker_that_dies)
    cloudpickle.register_pickle_by_value(studies)  # the workers cannot import it
    out = place / "out"
    try:
        summary = run_study(read_study(file), out, engine="ray")
    finally:
        cloudpickle.unregister_pickle_by_value(studies)
    assert summary.failed == 0, summary.failures()
    workers = {outcome.process for outcome in summary.outcomes.values()}
    assert not {os.getpid(), int((place / "died").read_text())} & workers
    torch.set_num_threads(1)
    run_study(read_study(file), place / "alone")
    assert numbers(out) == numbers(place / "alone")
    assert run_study(read_study(file), out, engine="ray").outcomes == summary.outcomes  # done: no Ray is started


def spec(source: str, **options: Any) -> ModelSpec:
    return ModelSpec(label="model", load=source, where=source, **options)


def test_what_a_cell_needs(place: Path) -> None:
    cell = read_study(write_study(place, circuit="memory_gb = 3")).cells[0]
    weights = (place / "dense" / "model.safetensors").stat().st_size
    assert resources(cell, gpus=False) == {"num_cpus": 1.0, "num_gpus": 0.0, "memory": weights + 3_000_000_000}
    assert resources(cell, gpus=True) == {"num_cpus": 1.0, "num_gpus": 1.0, "memory": weights}
    on_cpu = replace(cell, model=cell.model.replace(device="cpu", cpus=4.0))
    assert resources(on_cpu, gpus=True)["num_gpus"] == 0
    named = replace(cell, model=spec("allenai/OLMo-7B-hf", dtype="bfloat16", gpus=2.0))
    assert resources(named, gpus=True) == {"num_cpus": 1.0, "num_gpus": 2.0, "memory": 14_000_000_000}
    unknown = replace(cell, model=spec("someone/mine"))
    assert "memory" not in resources(unknown, gpus=False)


def test_what_no_machine_has_is_refused_not_waited_for() -> None:
    needs = {"num_cpus": 2.0, "num_gpus": 1.0, "memory": 8e9}
    machines = [{"CPU": 64.0, "memory": 9e9}, {"CPU": 1.0, "GPU": 1.0, "memory": 9e9}]
    assert "2 CPUs, 1 GPUs and 8.0 GB" in (too_much(needs, machines) or "")
    assert too_much(needs, [*machines, {"CPU": 2.0, "GPU": 4.0, "memory": 8e9}]) is None


def test_a_ray_that_does_not_start_is_one_sentence(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because")  # as Ray does

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(GatelensError, match=r"cannot start Ray on this machine \(The current node timed out"):
        run_study(read_study(write_study(place)), place / "out", engine="ray")


def test_without_ray(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GatelensError, match=r"pip install 'gatelens\[ray\]'"):
        run_study(read_study(write_study(place)), place / "out", engine="ray")
    assert not (place / "out").exists()

"""Runs that are killed, and runs of two processes: the losses are those of one undisturbed process."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import prompts

import gatelens
from gatelens.errors import GatelensError
from gatelens.sparse.sparsify._sharding import is_sharded

RUN = str(Path(__file__).parent / "sparsify_run.py")
NAMES = ("loss", "cross_entropy", "expected_open", "open", "multiplier")
# With --cpu accelerate starts one process, whatever --num_processes says, unless it is given hosts for mpirun. Its
# launcher of several is the one for GPUs, which the environment below keeps on the CPU.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
STEPS = 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=400)[0]))
    return path


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    out = tmp_path_factory.mktemp("undisturbed")
    start(text, out, batch=4).wait(timeout=120)
    return losses(out)


def start(
    text: Path, out: Path, batch: int, wait: float = 0.0, launch: tuple[str, ...] = (), kind: str = ""
) -> subprocess.Popen[bytes]:
    """The run in a process group of its own, so that nothing else can be killed with it."""
    command = [sys.executable, *launch, RUN, str(text), str(out), str(STEPS), str(batch), str(wait), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def losses(out: Path) -> list[list[float]]:
    with (out / "log.csv").open(newline="") as file:
        return [[float(row[name]) for name in NAMES] for row in csv.DictReader(file)]


def test_a_killed_run_continues_with_the_same_losses(
    text: Path, tmp_path: Path, undisturbed: list[list[float]]
) -> None:
    assert len(undisturbed) == STEPS
    run = start(text, tmp_path, batch=4, wait=0.3)
    while not ((tmp_path / "log.csv").exists() and len(losses(tmp_path)) >= 5):  # two steps after a checkpoint
        assert run.poll() is None
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    assert not (tmp_path / "config.json").exists()
    (tmp_path / "log.csv").open("a").write("6,0.1")  # and half a line
    assert start(text, tmp_path, batch=4).wait(timeout=120) == 0
    assert losses(tmp_path) == undisturbed
    assert (tmp_path / "config.json").exists()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000006", "step-000008"]


def test_two_processes_are_one_with_twice_the_batch(text: Path, tmp_path: Path, undisturbed: list[list[float]]) -> None:
    assert start(text, tmp_path, batch=2, launch=LAUNCH).wait(timeout=200) == 0
    same(losses(tmp_path), undisturbed)


def test_weights_cut_over_processes(text: Path, tmp_path: Path, undisturbed: list[list[float]]) -> None:
    """FSDP: stopped after five steps and continued, and its result opens."""
    assert start(text, tmp_path, batch=2, launch=LAUNCH, kind="fsdp").wait(timeout=200) == 0
    same(losses(tmp_path), undisturbed)
    kept = sorted(path.name for path in (tmp_path / "checkpoints" / "step-000008").iterdir())
    assert kept == ["optimizer.safetensors", "state.json", "weights.safetensors"]
    assert all(weight.isfinite().all() for weight in gatelens.load(tmp_path).hf.state_dict().values())


def test_the_first_fsdp_is_refused() -> None:
    with pytest.raises(GatelensError, match="fsdp_version 2"):
        is_sharded(SimpleNamespace(distributed_type="FSDP", is_fsdp2=False))
    assert is_sharded(SimpleNamespace(distributed_type="FSDP", is_fsdp2=True))
    assert not is_sharded(SimpleNamespace(distributed_type="MULTI_CPU"))


def same(found: list[list[float]], right: list[list[float]]) -> None:
    assert len(found) == STEPS
    for row, right_row in zip(found, right, strict=True):
        assert row == pytest.approx(right_row, rel=2e-4, abs=2e-6)

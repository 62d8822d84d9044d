"""Runs that are killed, and runs of two processes: the losses are those of one undisturbed process."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import gatelens
from gatelens.errors import GatelensError
from gatelens.sparse.sparsify._sharding import is_sharded

pytestmark = pytest.mark.slow
RUN = str(Path(__file__).parent / "sparsify_run.py")
NAMES = ("loss", "cross_entropy", "expected_open", "open", "multiplier")
# With --cpu accelerate starts one process, whatever --num_processes says, unless it is given hosts for mpirun. Its
# launcher of several is the one for GPUs, which the environment below keeps on the CPU.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    out = tmp_path_factory.mktemp("undisturbed")
    assert start(text, out, batch=4).wait() == 0
    return losses(out)


def start(
    text: Path, out: Path, batch: int, stop: int = 0, launch: tuple[str, ...] = (), kind: str = ""
) -> subprocess.Popen[str]:
    """The run in a process group of its own, so that nothing else can be killed with it.

    Arguments:
        stop: the step before which it waits for a line. This returns only when it is there.
    """
    command = [sys.executable, *launch, RUN, str(text), str(out), str(STEPS), str(batch), str(stop), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    pipe = subprocess.PIPE if stop else None
    run = subprocess.Popen(command, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, text=True)
    if run.stdout is not None:
        assert "stopped\n" in run.stdout  # reads until this line, or to the end
    return run


def losses(out: Path) -> list[list[float]]:
    with (out / "log.csv").open(newline="") as file:
        return [[float(row[name]) for name in NAMES] for row in csv.DictReader(file)]


def test_a_killed_run_continues_with_the_same_losses(
    text: Path, tmp_path: Path, undisturbed: list[list[float]]
) -> None:
    assert len(undisturbed) == STEPS
    with start(text, tmp_path, batch=4, stop=6) as run:
        os.killpg(run.pid, signal.SIGKILL)
    assert len(losses(tmp_path)) == 5  # two steps after a checkpoint
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    assert not (tmp_path / "config.json").exists()
    (tmp_path / "log.csv").open("a").write("6,0.1")  # and half a line
    assert start(text, tmp_path, batch=4).wait() == 0
    assert losses(tmp_path) == undisturbed
    assert (tmp_path / "config.json").exists()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000006", "step-000008"]


def test_a_second_start_is_refused_and_leaves_the_first_alone(
    text: Path, tmp_path: Path, undisturbed: list[list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    with start(text, tmp_path, batch=4, stop=2) as first:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert start(text, tmp_path, batch=4).wait() == 1
        assert f"GatelensError: another process is working in {tmp_path}: " in capfd.readouterr().err
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert first.stdin is not None
        first.stdin.write("go on\n")
    assert first.returncode == 0
    assert losses(tmp_path) == undisturbed


def test_two_processes_are_one_with_twice_the_batch(text: Path, tmp_path: Path, undisturbed: list[list[float]]) -> None:
    assert start(text, tmp_path, batch=2, launch=LAUNCH).wait() == 0
    same(losses(tmp_path), undisturbed)


def test_weights_cut_over_processes(text: Path, tmp_path: Path, undisturbed: list[list[float]]) -> None:
    """FSDP: stopped after five steps and continued, and its result opens."""
    assert start(text, tmp_path, batch=2, launch=LAUNCH, kind="fsdp").wait() == 0
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

"""Head gating in two processes that are stopped and resumed gives the numbers of one undisturbed process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from copying import copying_task
from head_gating_run import GATE, ONE_SEED, SETTINGS, model, tensors

from gatelens import Model, fit_head_gates
from gatelens.gates.roles import HeadRoles
from gatelens.jobs.roles import find_roles
from gatelens.measures.ablation import ablation_curve
from gatelens.measures.roles_result import RolesSettings, load_roles
from gatelens.runtime.context import Context
from gatelens.runtime.files import read_tensors
from gatelens.runtime.journal import Journal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")]
RUN = str(Path(__file__).parent / "head_gating_run.py")
# As in test_sparsify_processes.py: the launcher for several GPUs, told to use the CPU.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
TRAINED = Path(__file__).parents[1] / "trained_model"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that two processes wrote to, and what they printed."""
    out = tmp_path_factory.mktemp("two")
    command = [sys.executable, *LAUNCH, RUN, str(out), str(TRAINED)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


@pytest.fixture(scope="module")
def alone() -> HeadRoles:
    return fit_head_gates(model(), copying_task(8), SETTINGS)


def same(fitted: dict[str, torch.Tensor], expected: HeadRoles) -> None:
    for name, tensor in tensors(expected).items():
        torch.testing.assert_close(
            fitted[name], tensor, atol=1e-6, rtol=0, msg=lambda message, n=name: f"{n}: {message}"
        )


def test_each_process_has_rows_of_its_own(two: tuple[Path, str]) -> None:
    assert [json.loads((two[0] / f"share-{index}.json").read_text()) for index in (0, 1)] == [[0, 2], [1]]


def test_stopped_and_continued_they_find_what_one_finds(two: tuple[Path, str], alone: HeadRoles) -> None:
    for index in (0, 1):
        same(read_tensors(two[0] / f"found-{index}.safetensors"), alone)


def test_one_process_continues_what_two_began(two: tuple[Path, str], alone: HeadRoles, tmp_path: Path) -> None:
    shutil.copytree(two[0] / "stopped", tmp_path / "pieces")
    heads = alone.gates[0].numel()
    updates_kept = {
        path.stem: {name: len(packed) - 4 * heads - 1 for name, packed in read_tensors(path).items()}
        for path in (tmp_path / "pieces").iterdir()
    }
    assert updates_kept == {
        "G.0-of-2": {"gates-0": 6, "gates-2": 6},
        "G.1-of-2": {"gates-1": 6},
        "G+-and-G-.0-of-2": {"plus-0": 2, "plus-2": 2, "minus-0": 2, "minus-2": 2},
        "G+-and-G-.1-of-2": {"plus-1": 4, "minus-1": 4},
    }
    reported: list[tuple[str, int, int]] = []
    journal = Journal(tmp_path / "pieces", lambda *progress: reported.append(progress))
    same(tensors(fit_head_gates(model(), copying_task(8), SETTINGS, context=Context(journal=journal))), alone)
    # G is complete, and the rows of G+ and G- that are behind come first.
    assert reported == [("fit G", 0, 6), ("fit G", 6, 6), *(("fit G+ and G-", done, 6) for done in (0, 2, 3, 4, 5, 6))]


def test_they_share_the_ablation(two: tuple[Path, str], alone: HeadRoles) -> None:
    curve = ablation_curve(model(), copying_task(8), alone, most=3, batch=3)
    for index in (0, 1):
        shared = read_tensors(two[0] / f"found-{index}.safetensors")
        torch.testing.assert_close(shared["changes"], curve.changes, atol=1e-4, rtol=0)


def test_a_process_without_a_seed_gets_those_of_the_others(two: tuple[Path, str]) -> None:
    expected = fit_head_gates(model(), copying_task(8), ONE_SEED).minus
    for index in (0, 1):
        minus = read_tensors(two[0] / f"found-{index}.safetensors")["one seed"]
        torch.testing.assert_close(minus, expected, atol=1e-6, rtol=0)


def test_the_main_process_alone_writes_and_prints(two: tuple[Path, str], trained: Model) -> None:
    out, printed = two
    assert printed.count("written to") == printed.count("roles of heads") == 1
    files = {path.name for path in (out / "run").iterdir()}
    assert {"asked.json", "result.json", "roles.safetensors", "ablation.csv"} < files
    assert not {name for name in files if name == "pieces" or name.endswith(".tmp")}
    numbers = {key.removeprefix("--").replace("-", "_"): int(n) for key, n in zip(GATE[::2], GATE[1::2], strict=True)}
    expected, saved = find_roles(trained, "induction", RolesSettings(**numbers)), load_roles(out / "run")
    torch.testing.assert_close(saved.roles.losses, expected.roles.losses, atol=1e-4, rtol=0)
    for a, b in zip(saved.curves, expected.curves, strict=True):
        torch.testing.assert_close(a.changes, b.changes, atol=1e-3, rtol=0)

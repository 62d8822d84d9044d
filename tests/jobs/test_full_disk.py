"""A disk that is full or read-only at any write: one sentence, nothing half-written, and a rerun completes the run."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from families import prompts
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from fuzz import samples
from gatelens import GatelensError
from gatelens.jobs.circuit import find_circuit
from gatelens.jobs.roles import find_roles
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import run_study
from gatelens.measures.circuit_result import CircuitSettings, load_circuit
from gatelens.measures.roles_result import RolesSettings, load_roles
from gatelens.report.page import write_report
from gatelens.sparse.sparsify import SparsifySettings, sparsify

CIRCUIT: dict[str, Any] = {
    "method": "eap",
    "n": 3,
    "points": 3,
    "random_points": 2,
    "refine": 0.0,
    "areas": "none",
    "sample": 0,
    "describe": 0,
}
ROLES: dict[str, Any] = {"seeds": 1, "updates": 2, "batch": 2, "n": 2, "held_out": 1, "most": 1, "every": 1}


class Disk:
    """Refuses to replace or rename a file and to make a folder after some of them have succeeded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number, self.left = number, -1  # below 0: there is room
        for name in ("replace", "rename", "mkdir"):
            monkeypatch.setattr(Path, name, self._limited(getattr(Path, name)))

    def _limited(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def limited(path: Path, *arguments: Any, **options: Any) -> Any:
            counts = not path.name.startswith(".seconds.json") and not path.is_dir()  # the time may be lost
            if counts and self.left == 0:
                raise OSError(self.number, os.strerror(self.number), str(path))
            result = own(path, *arguments, **options)
            self.left -= counts
            return result

        return limited

    def run_until_it_ends(self, work: Callable[[], object]) -> int:
        """Start the work again after every error, with room for one more write than the last time.

        Returns:
            How many starts ended with one sentence.
        """
        for start in range(200):
            self.left = start
            try:
                work()
            except GatelensError as error:
                sentence = str(error)
                assert "\n" not in sentence
                assert os.strerror(self.number) in sentence
                assert "run the same command again" in sentence or "give another" in sentence
            else:
                self.left = -1
                return start
        raise AssertionError("the work does not end")


@pytest.fixture(params=[errno.ENOSPC, errno.EROFS])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Disk:
    samples.model(), samples.good_run()  # made before the disk is full
    return Disk(monkeypatch, request.param)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(samples.own_task())
    return path


def leftovers(folder: Path) -> list[Path]:
    """What a run writes only until it is complete."""
    return [path for path in folder.rglob("*") if path.suffix in (".tmp", ".part") or path.name == "pieces"]


def test_a_circuit(disk: Disk, own: Path, tmp_path: Path) -> None:
    settings = CircuitSettings(**CIRCUIT)
    whole = find_circuit(samples.model(), str(own), settings)
    failures = disk.run_until_it_ends(lambda: find_circuit(samples.model(), str(own), settings, out=tmp_path / "out"))
    assert failures > 2
    assert torch.equal(load_circuit(tmp_path / "out").curve.metrics, whole.curve.metrics)
    assert leftovers(tmp_path / "out") == []


def test_roles(disk: Disk, own: Path, tmp_path: Path) -> None:
    settings = RolesSettings(**ROLES)
    whole = find_roles(samples.model(), str(own), settings)
    failures = disk.run_until_it_ends(lambda: find_roles(samples.model(), str(own), settings, out=tmp_path / "out"))
    assert failures > 2
    assert torch.equal(load_roles(tmp_path / "out").roles.plus, whole.roles.plus)
    assert leftovers(tmp_path / "out") == []


def test_sparsify(disk: Disk, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=200)[0]))
    small: dict[str, Any] = {"steps": 2, "length": 8, "batch": 2, "lengths": (), "self_text": 0, "judge_sequences": 2}
    settings = SparsifySettings(checkpoint_every=1, **small)
    out = tmp_path / "out"
    failures = disk.run_until_it_ends(lambda: sparsify(samples.model(), text, settings, out=out))
    assert failures > 2
    assert [record["step"] for record in json.loads((out / "log.json").read_text())] == [1, 2]
    assert leftovers(out) == []


def test_a_study(disk: Disk, own: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(samples.model_folder())
    file = tmp_path / "study.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in CIRCUIT.items()]
    file.write_text('[models]\nsmall = "model"\n[circuit]\ntasks = ["mine.jsonl"]\n' + "\n".join(lines))
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115

    def work() -> None:
        summary = run_study(read_study(file), tmp_path / "out", console=console)
        for sentence in (*summary.failures(), *summary.problems):
            raise GatelensError(sentence)

    assert disk.run_until_it_ends(work) > 2
    assert (tmp_path / "out" / "summary.csv").exists()
    assert leftovers(tmp_path / "out") == []


def test_a_report_is_always_there(disk: Disk, tmp_path: Path) -> None:
    out = tmp_path / "report"
    with patch("gatelens.report.page.draw_pictures", lambda *_: ([], [])):
        write_report([samples.good_run()], out)

        def work() -> None:
            try:
                write_report([samples.good_run()], out)
            finally:
                assert (out / "index.html").exists()

        assert disk.run_until_it_ends(work) > 2
    assert leftovers(tmp_path) == []

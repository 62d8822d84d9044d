"""A disk that is full or read-only at any write: one sentence, nothing half-written, and a rerun completes the run."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
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
from gatelens.jobs.contrast import find_contrast
from gatelens.jobs.roles import find_roles
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import run_study
from gatelens.loading import load
from gatelens.loading.convert import convert_model
from gatelens.measures.circuit_result import load_circuit
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.contrast_result import TwoTaskSettings
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
    """Refuses every change below a folder after some of them have succeeded: to open a file for writing, to replace or
    rename a file or a folder, and to make a folder. Files may be removed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, place: Path) -> None:
        self.number, self.place = number, str(place)
        self.left = -1  # below 0: there is room
        for module, name in ((os, "open"), (os, "replace"), (os, "rename"), (os, "mkdir"), (io, "open")):
            monkeypatch.setattr(module, name, self._limited(getattr(module, name), name))
        monkeypatch.setattr(builtins, "open", io.open)

    def _limited(self, own: Callable[..., Any], name: str) -> Callable[..., Any]:
        def limited(path: Any, *arguments: Any, **options: Any) -> Any:
            if not self._counts(path, name == "open" and _only_reads(*arguments, **options)):
                return own(path, *arguments, **options)
            if self.left == 0:
                raise OSError(self.number, os.strerror(self.number), str(path))
            result = own(path, *arguments, **options)
            self.left -= 1
            return result

        return limited

    def _counts(self, path: Any, only_reads: bool) -> bool:
        if only_reads or self.left < 0 or not isinstance(path, str | Path) or not str(path).startswith(self.place):
            return False
        return not Path(path).name.startswith(".seconds.json") and not Path(path).is_dir()  # the time may be lost

    def fill(self, work: Callable[[], object], room: int) -> bool:
        """Start the work with room for some changes, and say whether it ended."""
        self.left = room
        try:
            work()
        except GatelensError as error:
            sentence = str(error)
            assert "\n" not in sentence
            assert os.strerror(self.number) in sentence
            assert "run the same command again" in sentence or "give another" in sentence
            return False
        finally:
            self.left = -1
        return True

    def run_until_it_ends(self, work: Callable[[], object]) -> int:
        """Start the work again after every error, with room for one more change than the last time.

        Returns:
            How many starts ended with one sentence.
        """
        return next(room for room in range(500) if self.fill(work, room))

    def run_in_fresh_folders(self, work: Callable[[Path], object]) -> int:
        """Start the work in a new folder, with room for one more change each time, and again without a limit.

        Returns:
            How many starts ended with one sentence.
        """
        for room in range(500):
            out = Path(self.place) / f"fresh-{room}" / "out"
            if self.fill(lambda out=out: work(out), room):  # type: ignore[misc]
                return room
            work(out)
            assert leftovers(out.parent) == []
            shutil.rmtree(out.parent)
        raise AssertionError("the work does not end")


def _only_reads(mode: Any = "r", *_: Any, **options: Any) -> bool:
    """Whether these arguments of `open` or `os.open` open a file for reading only."""
    if isinstance(mode, int):
        return not mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return not {*"wax+"} & {*options.get("mode", mode)}


@pytest.fixture(params=[errno.ENOSPC, errno.EROFS])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    samples.model(), samples.good_run()  # made before the disk is full
    return Disk(monkeypatch, request.param, tmp_path)


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


@pytest.mark.slow
@pytest.mark.parametrize("job", ["circuit", "gate", "contrast", "convert", "gguf"])
def test_every_change_of_a_new_folder(job: str, disk: Disk, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start after a full disk gives the result, whichever change was the first one that failed."""
    other = own.with_name("other.jsonl")
    other.write_bytes(own.read_bytes().replace(b"t5", b"t6"))
    gguf = own.with_name("model.gguf")
    gguf.write_bytes(samples.gguf_file())

    def circuit(out: Path) -> torch.Tensor:
        return find_circuit(samples.model(), str(own), CircuitSettings(**CIRCUIT), out=out).curve.metrics

    def gate(out: Path) -> torch.Tensor:
        return find_roles(samples.model(), str(own), RolesSettings(**ROLES), out=out).roles.plus

    def contrast(out: Path) -> torch.Tensor:
        small = TwoTaskSettings(seeds=1, updates=2, batch=2, n=2, held_out=0.5)
        return find_contrast(samples.model(), str(own), str(other), small, out=out).contrast.gates

    def convert(out: Path) -> torch.Tensor:
        return next(convert_model(str(samples.model_folder()), out, bias=0.0).hf.parameters())

    def load_gguf(out: Path) -> torch.Tensor:
        monkeypatch.setenv("GATELENS_CACHE", str(out))
        return next(load(gguf, check=False).hf.parameters())

    work = {"circuit": circuit, "gate": gate, "contrast": contrast, "convert": convert, "gguf": load_gguf}[job]
    whole = work(own.parent / "whole")
    assert disk.run_in_fresh_folders(lambda out: torch.testing.assert_close(work(out), whole, rtol=0, atol=0)) > 2

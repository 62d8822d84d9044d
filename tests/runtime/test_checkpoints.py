"""Checkpoints that are whole or not there."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gatelens.errors import GatelensError
from gatelens.runtime.checkpoints import Checkpoints


def content(path: Path) -> None:
    (path / "x").write_text("whole")


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a")
    assert checkpoints.last() is None
    for step in (20, 40, 1_000_000):
        checkpoints.write(step, content)
    assert checkpoints.steps() == [40, 1_000_000]
    last = checkpoints.last()
    assert last is not None
    assert (last / "x").read_text() == "whole"
    checkpoints.write(1_000_000, content)  # again, after a run that judged but did not go on
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(20, content)

    def killed(path: Path) -> None:
        (path / "x").write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(40, killed)
    assert checkpoints.steps() == [20]
    checkpoints.write(40, content)
    assert checkpoints.steps() == [20, 40]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "text"])
def test_a_full_disk(kind: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the system refuses the write half-way."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(20, content)

    def large(path: Path) -> None:
        numbers = torch.zeros(1_000_000)
        if kind == "safetensors":
            save_file({"x": numbers}, path / "x")
        elif kind == "torch":
            torch.save(numbers, path / "x")
        else:
            (path / "x").write_text("x" * 4_000_000)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(GatelensError, match=r"step 40.*step-000020 is complete.*free some disk space"):
            checkpoints.write(40, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.steps() == [20]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]


def test_other_errors_are_not_called_a_full_disk(tmp_path: Path) -> None:
    def wrong(path: Path) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        Checkpoints(tmp_path).write(20, wrong)


def test_only_the_main_process_renames(tmp_path: Path) -> None:
    waited: list[int] = []
    other = Checkpoints(tmp_path, main=False, wait=lambda: waited.append(1))
    (tmp_path / ".step-000020.part").mkdir()
    other.write(20, content)
    assert other.last() is None
    assert len(waited) == 2


def test_what_comes_later_could_not_be_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (20, 40, 30):
        checkpoints.write(step, content)
    assert checkpoints.steps() == [20, 30]


def test_a_refused_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    def refused(path: Path) -> None:
        raise GatelensError("no numbers")

    with pytest.raises(GatelensError, match=r"^no numbers$"):
        Checkpoints(tmp_path).write(20, refused)
    assert not list(tmp_path.iterdir())

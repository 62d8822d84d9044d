"""Files: whole or as they were before, and readable by those who may read."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gatelens.errors import GatelensError
from gatelens.runtime.files import (
    read_numbers,
    read_tensors,
    replace_file,
    write_csv,
    write_folder,
    write_json,
    write_tensors,
)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            replace_file(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "old")]
    replace_file(path, "new\r\n")
    assert path.read_bytes() == b"new\r\n"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_tensors_are_as_readable_as_what_lies_beside_them(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_json(tmp_path / "a.json", {})
        write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"a.json": 0o666 & ~mask, "a.safetensors": 0o666 & ~mask}


def test_tensors_that_share_memory_or_lie_apart_in_it(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"whole": whole, "again": whole, "row": whole[1], "column": whole[:, 1], "turned": whole.T}
    write_tensors(tmp_path / "a.safetensors", tensors)
    found = read_tensors(tmp_path / "a.safetensors")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def writer(text: str) -> Callable[[Path], None]:
    """Writes one file into a folder."""
    return lambda folder: (folder / "file").write_text(text) and None


def test_a_log_is_read_without_its_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss,text\n1,0.5,\n2,0.25,3\n3,0.1")
    assert read_numbers(path) == (
        ["step", "loss", "text"],
        [{"step": 1.0, "loss": 0.5}, {"step": 2.0, "loss": 0.25, "text": 3.0}],
    )
    path.write_text("step,loss\n1,many\n")
    with pytest.raises(GatelensError, match=r"cannot read .*log\.csv .*'many'"):
        read_numbers(path)


def test_a_file_in_a_folder_that_does_not_exist_says_so(tmp_path: Path) -> None:
    """The disk is not full, so no space is asked for."""
    with pytest.raises(GatelensError, match=r"The folder does not exist, or was removed in the meantime") as caught:
        write_csv(tmp_path / "missing" / "table.csv", ["a"], [])
    assert "disk space" not in str(caught.value)


class TestWriteFolder:
    def test_the_folder_is_there_when_all_is_written(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "deep" / "mine", writer("all"))
        assert (tmp_path / "deep" / "mine" / "file").read_text() == "all"
        assert len(list((tmp_path / "deep").iterdir())) == 1

    def test_nothing_stays_after_a_failure(self, tmp_path: Path) -> None:
        def write(folder: Path) -> None:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_folder(tmp_path / "mine", write)
        assert list(tmp_path.iterdir()) == []

    def test_another_process_that_was_faster_wins(self, tmp_path: Path) -> None:
        def write(folder: Path) -> None:
            writer("second")(folder)
            write_folder(tmp_path / "mine", writer("first"))

        write_folder(tmp_path / "mine", write)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        assert (tmp_path / "mine" / "file").read_text() == "first"

    def test_an_older_folder_is_replaced_with_all_its_contents(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "mine", writer("old"))
        (tmp_path / "mine" / "other").write_text("left over")
        write_folder(tmp_path / "mine", writer("new"), replace=True)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        assert [(path.name, path.read_text()) for path in (tmp_path / "mine").iterdir()] == [("file", "new")]

    def test_a_folder_that_cannot_be_written_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file"):
            write_folder(tmp_path / "file" / "mine", writer("all"))

    @pytest.mark.parametrize("mask", [0o022, 0o077])
    def test_its_mode_is_what_the_umask_gives(self, mask: int, tmp_path: Path) -> None:
        before = os.umask(mask)
        try:
            write_folder(tmp_path / "mine", writer("all"))
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o777 & ~mask

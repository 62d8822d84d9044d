"""The report of every folder in results/, as a fresh clone has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gatelens.report.page import write_report

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.name for path in (ROOT / "results").iterdir() if path.is_dir() and path.name != "bench")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of results/ that are in the repository, and no others."""
    listed = subprocess.run(["git", "ls-files", "-z", "results"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a clone of the repository, so that what a clone has is not known")
    place = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.stdout.decode().split("\0")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place / name)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_clone_can_be_reported(name: str, clone: Path, tmp_path: Path) -> None:
    folder = clone / "results" / name
    report = write_report([folder], tmp_path / "report")
    assert report.problems == []
    assert report.path.exists()
    assert report.figures > 0
    cells, trainings = folder.glob("cells/*/asked.json"), folder.glob("*/judged.csv")
    assert len(report.runs) == len([*cells, *trainings])
    # Nothing is drawn at the edges of a figure, so nothing is cut off.
    for figure in tmp_path.glob("report/figures/*.png"):
        pixels = matplotlib.image.imread(figure)[..., :3]
        edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert edges.min() > 0.9, figure.name

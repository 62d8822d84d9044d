"""Model folders for studies, and reports that are not drawn."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from studies import save_models

import gatelens.report.page
from gatelens.report.page import Report


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Path:
    """An empty folder with the two models in it."""
    return Path(shutil.copytree(models, tmp_path / "place"))


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Reports are not drawn, which takes a second for each figure; the names of the cells they would have are kept."""
    asked: list[list[str]] = []

    def write(folders: Sequence[Path], out: Path) -> Report:
        asked.append([folder.name for folder in folders])
        out.mkdir(exist_ok=True)
        (out / "index.html").write_text("report")
        return Report(out / "index.html", asked[-1], 0)

    monkeypatch.setattr(gatelens.report.page, "write_report", write)
    return asked

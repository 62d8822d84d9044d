"""The cache of the tests about loading."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Converted models go to a folder of the test's own."""
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("GATELENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

"""Every extra that a message or a page tells the user to install exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*ROOT.glob("*.*"), *(f for part in ("src", "docs", "examples") for f in (ROOT / part).rglob("*.*"))]
    named = {
        (file.name, extra.strip())
        for file in files
        if file.suffix in (".py", ".md", ".toml")
        for names in re.findall(r"gatelens\[([\w, -]+)\]", file.read_text(encoding="utf-8"))
        for extra in names.split(",")
    }
    assert {extra for _, extra in named} >= {"sparsify", "gguf", "datasets"}  # the search finds them
    assert not {(file, extra) for file, extra in named if extra not in extras}

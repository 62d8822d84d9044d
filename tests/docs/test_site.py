"""The site builds without a warning, and loads nothing from another server."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from blocks import ROOT

import gatelens

ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\bsrc=\"?(?:https?:)?//|<link[^>]*\brel=\"?(?:stylesheet|icon|preconnect)"
    r"\"?[^>]*\bhref=\"?(?:https?:)?//|@import|url\((?:https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        match = ELSEWHERE.search(page.read_text(encoding="utf-8"))
        assert match is None, f"{page.name}: {match}"
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\((?:https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_the_pattern_matches_other_servers() -> None:
    for text in ('<script src="https://a/b.js">', '<link rel="stylesheet" href="//a/b.css">', "url(https://a/b.woff)"):
        assert ELSEWHERE.search(text)
    assert not ELSEWHERE.search('<a href="https://a/b"><script src="assets/b.js">')


def test_every_formula_is_mathml(site: Path) -> None:
    source = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
    written = len(re.findall(r"^```math$", source, re.MULTILINE)) + len(re.findall(r"\$`", source))
    page = (site / "definitions.html").read_text(encoding="utf-8")
    formulas = re.findall(r"<math.*?</math>", page, re.DOTALL)
    assert len(formulas) == written > 20
    for formula in formulas:
        tree = ElementTree.fromstring(formula)
        assert not any("\\" in (node.text or "") for node in tree.iter()), f"LaTeX that was not converted: {formula}"
    assert "@@formula" not in page


def test_settings_and_commands_are_those_of_the_code(site: Path) -> None:
    settings = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    for name in ("random_points", "second_rate", "multiplier_damping"):
        assert f"<code>{name}</code>" in settings
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in ("--level", "--held-out", "--allow-pickle"):
        assert f"<code>{name}</code>" in commands


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html"))
    for name in gatelens.__all__:
        assert re.search(rf'id="gatelens\.[\w.]*\b{name}"|<code>gatelens\.{name}</code>', pages), name

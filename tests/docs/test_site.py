"""The site builds without a warning, and loads nothing from another server."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from blocks import ROOT

import gatelens

pytestmark = pytest.mark.slow
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


def test_arguments_that_are_described_together_have_their_types(site: Path) -> None:
    page = (site / "reference" / "python" / "sparse.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    for name in ("q", "k", "v"):
        assert any(f"<code>{name}</code>" in row and "Tensor" in row and "kv_head" in row for row in rows), name


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html"))
    for name in gatelens.__all__:
        assert re.search(rf'id="gatelens\.[\w.]*\b{name}"|<code>gatelens\.{name}</code>', pages), name


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium, which drives the browser, is not installed")
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("no chromium and chromedriver here: `make browser` installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    yield driver
    driver.quit()


def test_search_works_in_a_site_that_is_opened_from_disk(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "reference" / "python" / "heads.html").as_uri())
    browser.execute_script(
        "const box = document.querySelector('input.md-search__input');"
        "document.querySelector('#__search').click(); box.focus(); box.value = 'bootstrap';"
        "for (const name of ['keyup', 'input']) box.dispatchEvent(new Event(name, {bubbles: true}));"
    )
    results = "return [...document.querySelectorAll('.md-search-result__item a')].map((link) => link.href)"
    WebDriverWait(browser, 600).until(lambda driver: driver.execute_script(results))
    assert any("definitions.html" in link for link in browser.execute_script(results))


def test_formulas_are_not_cut_off(site: Path, browser: Any) -> None:
    browser.get((site / "definitions.html").as_uri())
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('.formula')].map((box) => {"
        "const [outer, inner] = [box, box.querySelector('math')].map((x) => x.getBoundingClientRect());"
        "return [box.textContent, outer.top <= inner.top && inner.bottom <= outer.bottom,"
        " box.scrollHeight <= box.clientHeight]; })"
    )
    assert len(boxes) > 10
    assert [text for text, inside, fits in boxes if not (inside and fits)] == []


def test_every_picture_is_there(site: Path) -> None:
    for page in ("gallery.html", "notebooks/first-circuit.html", "notebooks/one-sparse-head.html"):
        text = (site / page).read_text(encoding="utf-8")
        pictures = re.findall(r'<img[^>]*\bsrc="([^"]+)"', text)
        assert len(pictures) >= 3
        assert all((site / page).parent.joinpath(picture).is_file() for picture in pictures)

"""The page in a real browser, opened from disk: what it shows agrees with the data, by mouse and by keyboard."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import HOSTILE, SMALL, TOKENS, circuit_run, gate_run

from gatelens.report._components import links
from gatelens.report._reading import read_runs
from gatelens.report._runs import CircuitRun, RolesRun
from gatelens.report._views.circuits import MOST_EDGES
from gatelens.report._views.joins import joins
from gatelens.report.page import write_report

pytest.importorskip("selenium", reason="selenium, which drives the browser, is not installed")
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

AXE = Path(sys.prefix) / "unpacked" / "axe_playwright_python" / "axe.min.js"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver here: `make browser` installs them where apt-get can be used as root",
)


class Page:
    """The page in a browser, with helpers for the tests."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, width: int = 1280, scheme: str = "light") -> None:
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [_feature(scheme)]})
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(self.url)
        self.wait("return document.querySelector('#attention-plot .plot-container') !== null")

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def wait(self, script: str) -> None:
        WebDriverWait(self.driver, 30).until(lambda driver: driver.execute_script(script))

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)", selector)

    def pick(self, id_: str, text: str) -> None:
        Select(self.find(f"#{id_}")).select_by_visible_text(text)

    def serious(self) -> list[str]:
        """The serious and critical findings of axe-core, without preloading, which the page's policy forbids."""
        self.run(AXE.read_text())
        settings = {"resultTypes": ["violations"], "preload": False}
        violations = self.driver.execute_async_script(
            "const [settings, done] = arguments; axe.run(settings).then((x) => done(x.violations))", settings
        )
        bad = [violation for violation in violations if violation["impact"] in ("serious", "critical")]
        return [f"{rule['id']}: {[node['html'][:200] for node in rule['nodes'][:3]]}" for rule in bad]

    def drawn(self, side: int) -> set[str]:
        """The components that are drawn on a side."""
        plot = "document.querySelectorAll('#circuit-sides .plot')[arguments[0]]"
        return set(self.run(f"return {plot}.data.flatMap((trace) => trace.customdata)", side))

    def n_lines(self, side: int) -> int:
        """How many edges, and links of KV heads to their heads, are drawn on a side."""
        plot = "document.querySelectorAll('#circuit-sides .plot')[arguments[0]]"
        paths = self.run(f"return {plot}.layout.shapes.map((shape) => shape.path)", side)
        return sum(path.count("M") for path in paths)


def _feature(scheme: str) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": scheme}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    circuit_run(folder / "dense", model="small")
    circuit_run(folder / "sparse", model="sparse-small", sparse=True, seed=1)
    circuit_run(folder / "hostile", model=HOSTILE, task=HOSTILE, seed=2)
    gate_run(folder / "gate")
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Page]:
    report = write_report([runs], runs / "report")
    assert report.problems == []
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield Page(driver, report.path.as_uri())
    finally:
        driver.quit()


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page as it opens, wide, with no errors before."""
    page.driver.get_log("browser")
    page.open()
    return page


def circuit(runs: Path, name: str) -> CircuitRun:
    return next(run for run in read_runs([runs / name]).circuits)


def test_the_slider_by_keyboard_draws_the_top_edges_on_both_sides(fresh: Page, runs: Path) -> None:
    slider = fresh.find("#circuit-kept")
    for key in (Keys.HOME, *[Keys.ARROW_RIGHT] * 4, Keys.END):
        slider.send_keys(key)
        kept = int(fresh.find("#circuit-count").text.split()[0])
        assert slider.get_attribute("aria-valuetext").startswith(f"{kept} edge")
        for side, name in enumerate(("dense", "sparse")):
            run = circuit(runs, name)
            top = run.top_edges(kept)
            live = sum(0 < join <= kept for join in joins(SMALL, run.top_edges(MOST_EDGES)))
            status = fresh.texts("#circuit-sides .status")[side]
            assert status.startswith(f"{live} of {kept} edges are on a path, of {SMALL.n_edges} in all.")
            ends = {end for edge in top for end in _ends(edge)}
            assert fresh.drawn(side) == ends
            assert fresh.n_lines(side) == kept + len(links(SMALL, sorted(ends)))
    assert kept == SMALL.n_edges
    assert "explain 1.00 of the effect" in status


def _ends(edge: tuple[int, int]) -> tuple[str, str]:
    return SMALL.source_names[edge[0]], SMALL.destination_names[edge[1]].partition(".")[0]


def test_a_component_by_keyboard_shows_its_edges_on_both_sides(fresh: Page, runs: Path) -> None:
    fresh.find("#circuit-kept").send_keys(Keys.END)
    picker = fresh.find("#circuit-component")
    picker.send_keys("L1H2")
    assert Select(picker).first_selected_option.text == "L1H2"
    for side, name in enumerate(("dense", "sparse")):
        run = circuit(runs, name)
        details = f"#circuit-sides .side:nth-child({side + 1}) .details"
        assert fresh.texts(f"{details} h4")[0].startswith("L1H2, score ")
        row = SMALL.source_names.index("L1H2")
        outgoing = [
            (SMALL.destination_names[j], float(run.edge_scores[i, j])) for i, j in run.top_edges(MOST_EDGES) if i == row
        ]
        cells = fresh.texts(f"{details} .tables > div:nth-child(2) td")
        shown = list(zip(cells[::2], map(float, cells[1::2]), strict=True))
        assert [end.removesuffix(" (not on a path)") for end, _ in shown] == [end for end, _ in outgoing][:12]
        assert [score for _, score in shown] == pytest.approx([score for _, score in outgoing][:12], rel=0.01)


def test_pointing_at_a_component_chooses_it_on_both_sides(fresh: Page) -> None:
    fresh.find("#circuit-kept").send_keys(Keys.END)
    place = fresh.run(
        """const plot = document.querySelector('#circuit-sides .plot');
           plot.scrollIntoView({block: 'center'});
           const trace = plot.data.find(({customdata}) => customdata.includes('L1H2')), {_fullLayout: full} = plot;
           const at = trace.customdata.indexOf('L1H2');
           const box = plot.getBoundingClientRect();
           return [box.x + full.xaxis._offset + full.xaxis.l2p(trace.x[at]),
                   box.y + full.yaxis._offset + full.yaxis.l2p(trace.y[at])].map(Math.round)"""
    )
    actions = ActionChains(fresh.driver)
    actions.w3c_actions.pointer_action.move_to_location(*place)
    actions.perform()
    fresh.wait("return document.getElementById('circuit-component').value === 'L1H2'")
    assert all(text.startswith("L1H2, score") for text in fresh.texts("#circuit-sides .details > h4:first-child"))
    assert len(fresh.texts("#circuit-sides .details > h4:first-child")) == 2
    looks = fresh.texts("#circuit-sides .side:nth-child(1) .pairs li")
    assert looks
    assert all("→" in text for text in looks)


def test_heads_and_open_edges_of_the_attention_viewer(fresh: Page, runs: Path) -> None:
    for name, label in (("dense", "small, ioi"), ("sparse", "sparse-small, ioi")):
        prompt = circuit(runs, name).prompts[0]
        fresh.pick("attention-run", label)
        fresh.wait(f"return document.getElementById('attention-open').disabled === {json.dumps(name == 'dense')}")
        fresh.wait("return window.gatelens.patterns[document.getElementById('attention-run').value] !== undefined")
        fresh.pick("attention-head", "L2H1")
        weights = prompt.attention[2, 1].float()
        expected = weights.clone()
        expected[torch.ones_like(weights).triu(1).bool()] = torch.nan
        if prompt.open is not None:
            assert _close(_heat(fresh), expected.masked_fill(~prompt.open[2, 1], torch.nan))
            fresh.find("#attention-open").send_keys(Keys.SPACE)
        assert _close(_heat(fresh), expected)
        buttons = fresh.driver.find_elements(By.CSS_SELECTOR, "#attention-tokens button")
        buttons[2].send_keys(Keys.ENTER)
        best = int(weights[2].argmax())
        status = fresh.find("#attention-status").text
        assert status.startswith("L2H1: ␣the attends to ")
        assert f"{float(weights[2, best]):.3f}" in status.split(",")[0]


def _heat(page: Page) -> torch.Tensor:
    z = page.run("return document.getElementById('attention-plot').data[0].z")
    return torch.tensor([[torch.nan if x is None else x for x in row] for row in z])


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4, equal_nan=True)


def test_head_roles_by_keyboard(fresh: Page, runs: Path) -> None:
    run: RolesRun = read_runs([runs / "gate"]).roles[0]
    picker = fresh.find("#head-head")
    picker.send_keys("L1H3")
    roles = run.result.roles
    shown = fresh.find("#head-status").text.removeprefix("L1H3: ").split(", ")
    for text, kind in zip(shown, ("facilitation", "irrelevance", "interference"), strict=True):
        name, value = text.split()
        assert name == kind
        assert float(value) == pytest.approx(float(roles.kind(kind).mean(0)[1, 3]), rel=0.01)
    z = fresh.run("return document.querySelectorAll('#head-maps .plot')[2].data[0].z")
    assert torch.allclose(torch.tensor(z), roles.interference.mean(0), atol=1e-4)


def test_markup_in_prompts_and_names_is_shown_and_never_run(fresh: Page) -> None:
    fresh.pick("circuit-task", f"{HOSTILE}, eap")
    fresh.pick("attention-run", f"{HOSTILE}, {HOSTILE}")
    fresh.wait("return window.gatelens.patterns[document.getElementById('attention-run').value] !== undefined")
    fresh.find("#circuit-kept").send_keys(Keys.END)
    fresh.find("#circuit-component").send_keys("L2H1")
    assert fresh.run("return window.hacked === undefined")
    assert fresh.texts("#circuit-sides h3") == [HOSTILE]
    assert fresh.texts("#attention-tokens button")[1] == "␣" + TOKENS[1].strip()
    # In the drawing too, whose library knows some tags.
    ticks = fresh.texts("#attention-plot .ytick text")
    assert [text.strip() for text in ticks] == [
        "Once",
        "␣" + TOKENS[1].strip(),
        "␣the",
        "↵",
        "␣<b>cat</b>",
        "␣&amp; sat",
    ]
    assert fresh.run("return document.querySelectorAll('img[src=x]').length") == 0


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_nothing_serious_for_axe_and_nothing_overflows(page: Page, width: int, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not unpacked beside the environment: `make` does it")
    page.driver.get_log("browser")
    page.open(width, scheme)
    page.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    page.find("#circuit-component").send_keys("L1H2")
    assert page.serious() == []
    assert page.run("return document.documentElement.scrollWidth") <= width
    over = page.run(
        """return [...document.querySelectorAll('main *')].filter((x) => !x.closest('.scroll, svg')
           && x.getBoundingClientRect().right > innerWidth + 1).map((x) => x.outerHTML.slice(0, 100))"""
    )
    assert over == []
    assert page.driver.get_log("browser") == []


def test_a_wide_screen_is_used(page: Page) -> None:
    page.open(3840)
    assert page.run("return document.querySelector('#circuit-sides').clientWidth") > 2000
    sides = page.run("return [...document.querySelectorAll('.side')].map((x) => x.getBoundingClientRect().y)")
    assert len(sides) == 2
    assert sides[0] == sides[1]


def test_every_control_can_be_reached_by_tab(fresh: Page) -> None:
    reached = set()
    fresh.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    body = fresh.find("body")
    body.send_keys(Keys.TAB)
    for _ in range(60):
        reached.add(fresh.run("return document.activeElement.id || document.activeElement.tagName"))
        ActionChains(fresh.driver).send_keys(Keys.TAB).perform()
    controls = ("task", "left", "right", "component", "kept")
    assert {f"circuit-{name}" for name in controls} <= reached
    assert {"attention-run", "attention-prompt", "attention-head", "head-map", "head-head", "BUTTON", "A"} <= reached
    assert fresh.driver.get_log("browser") == []

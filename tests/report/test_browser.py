"""The page in a real browser, opened from disk: what it shows agrees with the data, by mouse and by keyboard."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import HOSTILE, ROLES, SEES, SMALL, TOKENS, circuit_run, gate_run, gates_of

from gatelens.model.graph import Graph
from gatelens.report._reading import read_runs
from gatelens.report._runs import CircuitRun, RolesRun
from gatelens.report._views.circuits import growth
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

BY_ROLE = "by-role"  # the task of a circuit of edges by role
HEADS = ("L1H2", "L0H3", "L2H1")


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
        # Ten minutes are not a deadline for a busy machine: they only end the test of a page that never gets there.
        WebDriverWait(self.driver, 600).until(lambda driver: driver.execute_script(script))

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
        return set(self.texts(f"#graph-sides .side:nth-child({side + 1}) .node text"))

    def n_edges(self, side: int) -> int:
        """How many edges are drawn on a side."""
        return len(self.texts(f"#graph-sides .side:nth-child({side + 1}) .edge"))

    def shown_heads(self) -> dict[str, str]:
        """The head that each view shows: picker, table, graph list, attention, maps and URL."""
        return self.run(
            """const text = (selector) => document.querySelector(selector).textContent;
               return {
                 picker: document.getElementById('select-head').value,
                 table: document.querySelector('#head-table tr.selected')?.dataset.head ?? 'none',
                 list: document.getElementById('graph-component').value,
                 graph: document.querySelector('#graph-sides .node.selected')?.dataset.name ?? 'none',
                 attention: text('#attention-head').replace('Attention of ', ''),
                 maps: text('#map-status strong'),
                 url: new URLSearchParams(location.hash.slice(1)).get('head'),
               }"""
        )


def _feature(scheme: str) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": scheme}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    circuit_run(folder / "dense", model="small", described=HEADS)
    circuit_run(folder / "sparse", model="sparse-small", sparse=True, seed=1, described=("L0H3", "L1H0"))
    circuit_run(folder / "heads", model="small", level="heads")
    circuit_run(folder / "hostile", model=HOSTILE, task=HOSTILE, seed=2, described=HEADS)
    circuit_run(folder / "tokens", model="small", task=BY_ROLE, level="edges-by-role", seed=3)
    circuit_run(folder / "untold", model="small", task=BY_ROLE, seed=4)
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
    driver.set_script_timeout(600)  # axe takes long on a busy machine
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


def test_a_head_is_shown_everywhere_wherever_it_is_selected(fresh: Page) -> None:
    def everywhere(head: str) -> dict[str, str]:
        views = ("picker", "table", "list", "graph", "attention", "maps", "url")
        return dict.fromkeys(views, head)

    fresh.run("window.gatelens.select({edges: 1000})")  # all components are drawn
    # 1. In the table, by keyboard.
    fresh.find("#head-table button[data-head=L0H3]").send_keys(Keys.ENTER)
    assert fresh.shown_heads() == everywhere("L0H3")
    # 2. In the list at the top.
    fresh.pick("select-head", fresh.run("return document.querySelector('#select-head option[value=L2H1]').textContent"))
    assert fresh.shown_heads() == everywhere("L2H1")
    # 3. In the graph, by mouse.
    fresh.run("document.querySelector('.node[data-name=L1H2]').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert fresh.shown_heads() == everywhere("L1H2")
    # 4. In a map and in the curve, by the events of the drawing library.
    fresh.run("document.querySelector('#map-maps .plot').emit('plotly_click', {points: [{x: 3, y: 0}]})")
    assert fresh.shown_heads() == everywhere("L0H3")
    expected = fresh.run(
        """const plot = document.querySelector('#effect-panels .plot');
           const data = plot.data.find(({meta}) => meta === 'small'), at = data.customdata.length - 2;
           plot.emit('plotly_click', {points: [{data, customdata: data.customdata[at]}]});
           return data.customdata[at][1];"""
    )
    shown = fresh.shown_heads()
    assert shown["picker"] == shown["graph"] == shown["attention"] == shown["url"] == expected
    assert fresh.driver.get_log("browser") == []


def test_the_fragment_keeps_the_selection(fresh: Page) -> None:
    fresh.pick("select-model", "sparse-small")
    fresh.run("window.gatelens.select({head: 'L2H1', edges: 12})")
    url, before = fresh.driver.current_url, fresh.texts("#graph-sides .status")
    fresh.driver.get("about:blank")
    fresh.driver.get(url)
    fresh.wait("return document.querySelector('#attention-plot .plot-container') !== null")
    assert fresh.find("#select-model").get_attribute("value") == "sparse-small"
    assert fresh.shown_heads()["attention"] == "L2H1"
    assert fresh.texts("#graph-sides .status") == before
    # What does not exist in this report is replaced by what does.
    fresh.driver.get("about:blank")
    fresh.driver.get(f"{fresh.url}#task=none&model=%3Cb%3E&head=L99H99&edges=x&prompt=77")
    fresh.wait("return document.querySelector('#attention-plot .plot-container') !== null")
    assert fresh.find("#select-model").get_attribute("value") == "small"
    assert fresh.shown_heads()["attention"].startswith("L")
    assert fresh.driver.get_log("browser") == []


def test_the_slider_draws_circuits_whose_size_is_what_it_says(fresh: Page, runs: Path) -> None:
    for side, name in enumerate(("dense", "sparse")):
        edges, circuits = growth(SMALL, circuit(runs, name).top_edges(SMALL.n_edges))
        slider = fresh.find(f"#graph-sides .side:nth-child({side + 1}) input")
        for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.END):
            slider.send_keys(key)
            size, k = circuits[int(slider.get_attribute("value"))]
            noun = "edge" if size == 1 else "edges"
            count = fresh.texts("#graph-sides output")[side]
            status = fresh.texts("#graph-sides .status")[side]
            ends = {end for edge in edges[:size] for end in _ends(edge)}
            assert slider.get_attribute("aria-valuetext") == f"{size} {noun}" == count
            assert status.startswith(f"{size} {noun} between {len(ends)} components, from the first {k} of the ranking")
            assert fresh.n_edges(side) == size
            assert fresh.drawn(side) == ends
            listed = set(fresh.texts("#graph-component option")[1:])
            assert listed == fresh.drawn(0) | fresh.drawn(1)
        assert size == SMALL.n_edges


def _ends(edge: tuple[int, int]) -> tuple[str, str]:
    return SMALL.source_names[edge[0]], SMALL.destination_names[edge[1]].partition(".")[0]


def test_edges_by_role_stand_in_the_columns_of_their_roles(fresh: Page, runs: Path) -> None:
    """The slider draws exactly the edges of the ranking that are on a path, each at its role."""
    run, graph = circuit(runs, "tokens"), SMALL
    edges, circuits = growth(graph, run.ranked_gates(), sees=SEES)
    fresh.run("window.gatelens.select({task: arguments[0], edges: 30})", BY_ROLE)
    assert fresh.texts("#graph-method option") == ["edges by role, eap", "edges, eap"]
    slider = fresh.find("#graph-sides .side:first-child input")
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.END):
        slider.send_keys(key)
        size, k = circuits[int(slider.get_attribute("value"))]
        kept = torch.zeros(len(ROLES), *graph.edges.shape, dtype=torch.bool)
        kept[tuple(torch.tensor(run.ranked_gates()[:k]).T)] = True
        on_paths = graph.on_a_path(kept[None], SEES)[0].nonzero().tolist()
        assert sorted(map(tuple, on_paths)) == sorted(edges[:size])
        [status] = fresh.texts("#graph-sides .status")
        ends = {end for _, *edge in edges[:size] for end in _ends((edge[0], edge[1]))}
        words = (
            f"{size} edge{'s' * (size != 1)} by role between {len(ends)} components, from the first {k} of the ranking"
        )
        assert status.startswith(f"{words} ({int(gates_of('edges-by-role').sum())} in all)")
        assert fresh.drawn(0) == ends
        drawn = sorted(text.rpartition(": ")[0] for text in fresh.texts("#graph-sides .edge title"))
        assert drawn == sorted(
            f"{graph.source_names[i]} → {graph.destination_names[j]} at {ROLES[role]}" for role, i, j in edges[:size]
        )
    # Every component stands inside the column of its role, and none covers another one.
    boxes = fresh.run(
        """const all = (selector) => [...document.querySelectorAll(`#graph-sides ${selector}`)];
           const lines = all('line.column').map((line) => line.getBoundingClientRect().x);
           const roles = all('text.role title').map((title) => title.textContent);
           return all('.node').map((node) => {
             const {x, y, width, height} = node.querySelector('rect').getBoundingClientRect();
             const at = lines.findLastIndex((line) => line <= x), end = lines[at + 1] ?? 1e9;
             return [node.querySelector('title').textContent, roles[at], x, y, width, height, end];
           })"""
    )
    assert {role for _, role, *_ in boxes} == set(ROLES)
    for i, (name, role, x, y, width, height, end) in enumerate(boxes):
        assert name.endswith(f" at {role}")
        assert x + width <= end
        assert not any(abs(x - left) < width and abs(y - top) < height for _, _, left, top, *_ in boxes[:i])
    assert fresh.driver.get_log("browser") == []


def test_circuits_of_a_task_with_and_without_roles(fresh: Page) -> None:
    fresh.run("window.gatelens.select({task: arguments[0], edges: 1000})", BY_ROLE)
    fresh.pick("graph-method", "edges, eap")
    assert fresh.find("#graph-sides .slider output").text == f"{SMALL.n_edges} edges"
    assert fresh.texts("#graph-sides text.role") == []
    fresh.pick("graph-method", "edges by role, eap")
    fresh.run("window.gatelens.select({head: 'L1H2', edges: 1000})")
    assert len(fresh.texts("#graph-sides .node.selected")) == len(ROLES)
    inputs = fresh.texts("#graph-sides .tables > div:first-child tr td:first-child")
    assert "L1KV1 at IO" in inputs
    assert len(inputs) == len(set(inputs))


def test_the_graph_points_upwards_and_components_do_not_overlap(fresh: Page) -> None:
    fresh.run("window.gatelens.select({edges: 1000})")
    boxes = fresh.run(
        """return [...document.querySelectorAll('#graph-sides .side:first-child .node')].map((node) => {
             const {x, y, width, height} = node.querySelector('rect').getBoundingClientRect();
             return [node.dataset.name, x, y, width, height];
           })"""
    )
    assert len(boxes) == 1 + 12 + 6 + 3 + 1
    for i, (_, x, y, width, height) in enumerate(boxes):
        assert not any(abs(x - other_x) < width and abs(y - other_y) < height for _, other_x, other_y, *_ in boxes[:i])
    heights = {name: y for name, _, y, *_ in boxes}
    for i, j in SMALL.edges.nonzero().tolist():
        source, destination = _ends((i, j))
        assert heights[source] > heights[destination]


def test_two_hundred_edges_of_a_model_of_usual_size_can_be_read(page: Page, runs: Path) -> None:
    """12 layers of 12 heads: no component covers another one, none is cut off, and the names have their full size."""
    large = Graph(n_layers=12, n_heads=12, n_kv_heads=12)
    scores = torch.randn(large.edges.shape, generator=torch.Generator().manual_seed(0)) * large.edges
    circuit_run(runs.parent / "large", model="large", graph=large, scores=scores, described=("L0H3",))
    report = write_report([runs.parent / "large"], runs.parent / "large-report")
    page.driver.get_log("browser")
    Page(page.driver, report.path.as_uri()).open()
    page.run("window.gatelens.select({edges: 210})")
    sizes = [size for size, _ in growth(large, read_runs([runs.parent / "large"]).circuits[0].top_edges(1000))[1]]
    assert page.n_edges(0) in sizes
    assert page.n_edges(0) >= 200
    assert page.texts("#graph-sides output") == [f"{page.n_edges(0)} edges"]
    assert set(page.texts("#graph-component option")[1:]) == page.drawn(0)
    frame, boxes = page.run(
        """const box = (x) => { const {x: left, y, right, bottom} = x.getBoundingClientRect();
                                return [left, y, right, bottom]; };
           const sizes = [...document.querySelectorAll('.node text')].map(
             (text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a);
           const nodes = [...document.querySelectorAll('.node rect')].map((rect, i) => [...box(rect), sizes[i]]);
           return [box(document.querySelector('#graph-sides .graph svg')), nodes];"""
    )
    for i, (left, top, right, bottom, size) in enumerate(boxes):
        assert size >= 10
        assert left >= frame[0] - 1
        assert right <= frame[2] + 1
        assert not any(left < r and x < right and top < b and y < bottom for x, y, r, b, _ in boxes[:i])
    assert page.driver.get_log("browser") == []


def test_a_prompt_with_its_answers_and_their_probabilities(fresh: Page) -> None:
    assert fresh.find("#attention-answers").text.replace(" ", "") == "Rightanswer:␣mat,wrong:␣rug"
    shares = fresh.texts("#attention-predictions .share")
    assert shares[:6] == ["75 %", "13 %", "50 %", "25 %", "6 %", "50 %"]
    names = fresh.texts("#attention-predictions tbody th")
    assert names[:3] == ["everything", "circuit alone: 8 edges, eap", "without the circuit: 8 edges, eap"]
    assert sorted(names[3:]) == ["circuit alone: 8 heads, eap", "without the circuit: 8 heads, eap"]


@pytest.mark.parametrize("selector", ["#effect-panels", "#graph-sides", "#attention-bar", "#map-maps"])
def test_figures_are_saved_as_svg_and_png(fresh: Page, selector: str) -> None:
    for number, kind in enumerate(("svg", "png")):
        file, size, begin = fresh.driver.execute_async_script(
            """const [selector, number, done] = arguments;
               document.addEventListener('gatelens:saved', async ({detail: {file, blob}}) => {
                 const bytes = new Uint8Array(await blob.arrayBuffer());
                 done([file, bytes.length, String.fromCharCode(...bytes.slice(0, 400))]);
               }, {once: true});
               document.querySelectorAll(`${selector} .buttons button`)[number].click();""",
            selector,
            number,
        )
        assert file.endswith(f".{kind}")
        assert size > 1000
        assert begin.startswith("<svg" if kind == "svg" else "\x89PNG")
    assert fresh.driver.get_log("browser") == []


def test_a_head_lists_the_keys_and_values_that_it_reads(fresh: Page) -> None:
    fresh.run("window.gatelens.select({head: 'L1H2', edges: 1000})")
    [source, *_] = fresh.texts("#graph-sides .side:first-child .tables > div:first-child tr:last-child td")
    assert source == "L1KV1"  # heads 2 and 3 of a layer share it
    fresh.run("window.gatelens.select({head: 'L1KV1'})")
    readers = fresh.texts("#graph-sides .side:first-child .tables > div:last-child tr td:first-child")
    assert readers[-2:] == ["L1H2", "L1H3"]


def test_a_drawing_that_is_wider_than_its_frame_says_so(page: Page) -> None:
    for width in (1280, 420):
        page.open(width, "light")
        page.run("window.gatelens.select({head: 'L1H2', edges: 1000})")
        hints = ["scroll it sideways" in status for status in page.texts("#graph-sides .status")]
        wide = page.run(
            "return [...document.querySelectorAll('#graph-sides .graph')].map((x) => x.scrollWidth > x.clientWidth)"
        )
        assert hints == wide


def test_at_420_pixels_all_numbers_are_in_view(page: Page) -> None:
    page.driver.get_log("browser")
    page.open(420)
    page.pick("select-model", "sparse-small")
    hidden = page.run(
        """return [...document.querySelectorAll('.cards td, .cards th[scope=row], .counts strong')].filter((cell) => {
             const box = cell.getBoundingClientRect();
             return cell.textContent.trim() && (box.width === 0 || box.left < 0 || box.right > 420);
           }).map((cell) => cell.textContent)"""
    )
    assert hidden == []
    assert any("(8 to 8; 3 prompts)" in text for text in page.texts(".summary td"))
    label = page.run("return getComputedStyle(document.querySelector('.heads td'), '::before').content")
    assert label == '"Score"'


def test_a_single_file_works(page: Page, runs: Path) -> None:
    report = write_report([runs], runs.parent / "single" / "report.html", single_file=True)
    page.driver.get_log("browser")
    page.driver.get(report.path.as_uri() + "#task=ioi&head=L2H1")
    page.wait("return document.querySelector('#attention-plot .plot-container') !== null")
    assert page.shown_heads()["attention"] == "L2H1"
    assert page.n_edges(0) > 0
    assert page.run("return [...document.images].every((image) => image.src.startsWith('data:'))")
    assert (
        page.run("return performance.getEntriesByType('resource').filter(({name}) => !name.startsWith('data:'))") == []
    )
    assert page.driver.get_log("browser") == []


def test_heads_and_open_edges_of_the_attention_viewer(fresh: Page, runs: Path) -> None:
    for number, (name, label) in enumerate((("dense", "small"), ("sparse", "sparse-small"))):
        prompt = circuit(runs, name).prompts[0]
        fresh.pick("select-model", label)
        fresh.wait(f"return window.gatelens.patterns[{number}] !== undefined")
        assert fresh.find("#attention-open").is_displayed() == (name == "sparse")
        fresh.run("window.gatelens.select({head: 'L2H1'})")
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


def test_a_head_of_a_sparse_model_has_its_dense_one_below_it(fresh: Page) -> None:
    """The dense run describes L1H2 (+1), L0H3 (+0.75) and L2H1; the sparse one L0H3 (+1) and L1H0."""

    def rows() -> list[list[str]]:
        return [[name, *fresh.texts(f"#head-table tr:nth-child({i}) strong")] for i, name in enumerate(titles(), 1)]

    def titles() -> list[str]:
        return fresh.texts("#head-table tbody th")

    assert titles() == list(HEADS)
    fresh.pick("select-model", "sparse-small")
    assert rows() == [["L0H3", "+1"], ["dense", "+0.75"], ["L1H0", "+0.75"], ["dense"]]
    assert fresh.texts("#head-table .missing") == ["The run of the dense model does not describe this head."]
    assert fresh.texts("#head-note")[0].endswith("the same head of small, the dense model.")
    fresh.find("#head-table .dense:last-child th").click()
    assert fresh.shown_heads()["table"] == "L1H0"
    assert len(fresh.texts("#head-table tr.selected")) == 2
    fresh.pick("select-head", next(text for text in fresh.texts("#select-head option") if text.startswith("L2H2")))
    assert fresh.texts("#head-status") == ["L2H2 is not among the 2 heads of this table."]


def test_roles_of_a_head_in_the_maps_and_in_the_table(fresh: Page, runs: Path) -> None:
    run: RolesRun = read_runs([runs / "gate"]).roles[0]
    roles = run.result.roles
    fresh.pick("map-map", "roles: syntax in small")
    fresh.run("window.gatelens.select({head: 'L1H2'})")
    shown = fresh.find("#map-status").text.removeprefix("L1H2: ").split(", ")
    means = {kind: float(roles.kind(kind).mean(0)[1, 2]) for kind in ("facilitation", "irrelevance", "interference")}
    for text, (kind, mean) in zip(shown, means.items(), strict=True):
        name, value = text.split()
        assert name == kind
        assert float(value) == pytest.approx(mean, rel=0.01)
    z = fresh.run("return document.querySelectorAll('#map-maps .plot')[2].data[0].z")
    assert torch.allclose(torch.tensor(z), roles.interference.mean(0), atol=1e-4)
    best = max(means, key=lambda kind: means[kind])
    role = fresh.find("#head-table tr[data-head=L1H2] .role")
    assert best in role.get_attribute("class")
    assert role.text.endswith(f"{means[best]:.2f}")
    columns = fresh.texts("#head-table thead th")
    assert "Role in syntax" in columns
    assert "Open keys" not in columns  # a dense model has none: empty columns are not drawn


def test_markup_in_prompts_and_names_is_shown_and_never_run(fresh: Page) -> None:
    fresh.run("window.gatelens.select({task: arguments[0], head: 'L2H1', edges: 1000})", HOSTILE)
    fresh.wait("return document.querySelectorAll('#attention-tokens button[aria-pressed=true]').length === 1")
    assert fresh.run("return window.hacked === undefined")
    assert fresh.texts("#graph-sides h3") == [HOSTILE]
    assert fresh.texts("#attention-tokens button")[1] == "␣" + TOKENS[1].strip()
    assert fresh.texts("#head-table tbody tr:first-child code")[1] == "␣" + TOKENS[1].strip()
    # In the drawing too, whose library knows some tags.
    fresh.wait("return document.querySelectorAll('#attention-plot .ytick text').length === 6")
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
    assert fresh.run("return window.hacked === undefined")


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_nothing_serious_for_axe_and_nothing_overflows(page: Page, width: int, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not unpacked beside the environment: `make` does it")
    page.driver.get_log("browser")
    page.open(width, scheme)
    page.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    page.run("window.gatelens.select({model: 'sparse-small', head: 'L0H3', edges: 1000})")
    assert len(page.texts("#head-table tr.dense.selected")) == 1
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
    assert page.run("return document.querySelector('#graph-sides').clientWidth") > 2000
    sides = page.run("return [...document.querySelectorAll('.side')].map((x) => x.getBoundingClientRect().y)")
    assert len(sides) == 2
    assert sides[0] == sides[1]


def test_every_control_can_be_reached_by_tab(fresh: Page) -> None:
    reached = set()
    fresh.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    body = fresh.find("body")
    body.send_keys(Keys.TAB)
    for _ in range(70):
        reached.add(fresh.run("return document.activeElement.id || document.activeElement.tagName"))
        ActionChains(fresh.driver).send_keys(Keys.TAB).perform()
    assert {"select-task", "select-model", "select-head", "effect-gates", "graph-beside", "graph-component"} <= reached
    assert {"map-map", "BUTTON", "A", "INPUT"} <= reached
    assert fresh.driver.get_log("browser") == []

"""The page's files: what is in them agrees with the runs, and nothing in a run can become markup."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import HOSTILE, SMALL, TOKENS, circuit_run, curve, gate_run, sparsify_run

import gatelens.report.page
from gatelens import GatelensError
from gatelens.cli import main
from gatelens.measures.circuit_tests import CircuitTests, DroppedGate, save_tests
from gatelens.measures.hypotheses import HypothesisTest
from gatelens.measures.stability import Stability, StabilityLine, save_stability
from gatelens.model.graph import Graph
from gatelens.report._reading import read_runs
from gatelens.report._summary import Entry, summarise
from gatelens.report._views import attention_views, circuit_views, curve_views, task_views
from gatelens.report._views.circuits import growth
from gatelens.report._views.joins import joins
from gatelens.report.page import as_script, write_report


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a sparse model, of which the sparse one needs a quarter of the edges."""
    folder = tmp_path_factory.mktemp("pair")
    circuit_run(folder / "sparse", model="sparse-small", sparse=True, needed=8, seed=1)
    circuit_run(folder / "dense", needed=32)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report over runs of every kind whose names are markup; one run is damaged."""
    folder = tmp_path_factory.mktemp("page")
    circuit_run(folder / "edges", model=HOSTILE, task=HOSTILE)
    circuit_run(folder / "heads", level="heads", task="$x^2$")
    gate_run(folder / "gate", model=HOSTILE)
    sparsify_run(folder / "sparsify")
    (circuit_run(folder / "bad") / "result.json").write_text("{")
    report = write_report([folder], folder / "report")
    assert len(report.runs) == 4
    assert len(report.problems) == 1, report.problems
    return report.path.parent


def data_of(report: Path) -> Any:
    text = (report / "data" / "report.js").read_text()
    return json.loads(text.removeprefix("window.gatelens = {data: ").removesuffix("};\n"))


def lead_of(page: Path) -> str:
    """The sentence at the top of a page."""
    lead = re.search(r'<p class="lead">(.*?)</p>', page.read_text())
    assert lead is not None
    return html.unescape(lead[1])


def numbers(entry: Entry) -> tuple[int | None, float | None]:
    """The count and the multiplier."""
    return entry.count.value, None if entry.multiplier is None else entry.multiplier.ratio


class TestSummary:
    def test_multipliers_are_dense_over_sparse(self, pair: Path) -> None:
        (group,) = summarise(read_runs([pair]).circuits)
        assert [(entry.label, *numbers(entry)) for entry in group.entries] == [
            ("small", 32, None),
            ("sparse-small", 8, 4.0),
        ]
        assert [entry.random.value for entry in group.entries if entry.random] == [SMALL.n_edges, SMALL.n_edges]

    def test_of_several_dense_models_the_one_by_name(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "a", model="large", needed=40)
        circuit_run(tmp_path / "b", model="small", needed=20)
        circuit_run(tmp_path / "c", model="sparse-small", sparse=True, needed=10)
        circuit_run(tmp_path / "d", model="thin", sparse=True, needed=10)
        (group,) = summarise(read_runs([tmp_path]).circuits)
        assert {entry.label: (entry.dense, numbers(entry)[1]) for entry in group.entries if entry.result.sparse} == {
            "sparse-small": ("small", 2.0),
            "thin": (None, None),
        }

    def test_a_dense_model_of_another_shape_or_a_shorter_name_is_not_the_one(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "a", model="gpt2", needed=40)
        circuit_run(tmp_path / "b", model="gpt2-medium", needed=20)
        circuit_run(tmp_path / "c", model="sparse-gpt2-medium", sparse=True, needed=10)
        circuit_run(tmp_path / "d", model="sparse-olmo", sparse=True, needed=10, graph=Graph(2, 4, 4))
        (group,) = summarise(read_runs([tmp_path]).circuits)
        assert {entry.label: entry.dense for entry in group.entries if entry.result.sparse} == {
            "sparse-gpt2-medium": "gpt2-medium",
            "sparse-olmo": None,
        }

    def test_a_group_for_each_task_level_and_method(self, tmp_path: Path) -> None:
        for task, level in (("ioi", "edges"), ("ioi", "heads"), ("docstring", "edges")):
            circuit_run(tmp_path / f"{task}-{level}", task=task, level=level)
        groups = summarise(read_runs([tmp_path]).circuits)
        assert {(group.task, group.level) for group in groups} == {
            ("ioi", "edges"),
            ("ioi", "heads"),
            ("docstring", "edges"),
        }

    def test_runs_with_other_thresholds_are_counted_at_their_own(self, tmp_path: Path) -> None:
        for name, sparse, needed in (("small", False, 32), ("sparse-small", True, 8)):
            for threshold in (0.5, 0.9):
                folder = circuit_run(tmp_path / f"{name}-{threshold}", model=name, sparse=sparse, needed=needed)
                result = json.loads((folder / "result.json").read_text())
                result["settings"]["threshold"] = threshold
                (folder / "result.json").write_text(json.dumps(result))
        low, high = summarise(read_runs([tmp_path]).circuits)
        assert [numbers(entry) for entry in low.entries] == [(16, None), (4, 4.0)]
        assert [numbers(entry) for entry in high.entries] == [(32, None), (8, 4.0)]
        assert [group.title for group in (low, high)] == ["ioi, edges, eap at 50%", "ioi, edges, eap at 90%"]

    def test_a_run_that_names_its_dense_model_is_compared_with_it(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "a", model="large", needed=40)
        circuit_run(tmp_path / "b", model="small", needed=20)
        folder = circuit_run(tmp_path / "c", model="sparse-small", sparse=True, needed=10)
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(result | {"dense": "large"}))
        (group,) = summarise(read_runs([tmp_path]).circuits)
        (sparse,) = [entry for entry in group.entries if entry.result.sparse]
        assert (sparse.dense, *numbers(sparse)) == ("large", 10, 4.0)

    def test_the_table_shows_counts_and_validity(self, pair: Path, tmp_path: Path) -> None:
        text = write_report([pair], tmp_path / "report").path.read_text()
        table = text[text.index('<table class="cards summary"') :].partition("</table>")[0]
        rows = [
            [html.unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.S)]
            for row in re.findall(r"<tr>.*?</tr>", table, re.S)
        ]
        total = str(SMALL.n_edges)
        random, trust = f"{total} ({total} to {total}; 3 prompts)", ["0.95", "-0.12", "0.88 (no interval; 24 gates)"]
        assert rows[0][-4:] == ["Multiplier", "Effect", "Effect of the rest", "Correlation"]  # no run has an overlap
        assert rows[1] == ["ioi", "edges, eap", "small", "32 (32 to 32; 3 prompts)", total, random, "-", *trust]
        multiplier = "4.00x (4.00 to 4.00; 3 prompts)"
        labels = ["ioi", "edges, eap", "sparse-small sparse"]
        assert rows[2] == [*labels, "8 (8 to 8; 3 prompts)", total, random, multiplier, *trust]
        assert lead_of(tmp_path / "report" / "index.html") == (
            f"sparse-small needs 8 (8 to 8; 3 prompts) of {total} edges for 90% of the effect on ioi, and small needs "
            f"32 (32 to 32; 3 prompts): {multiplier}."
        )
        assert "belong to the KV head" in text

    def test_the_first_sentence_is_about_the_most_telling_task(self, tmp_path: Path) -> None:
        """Of curves without noise, every interval is the ratio itself: 1 on ioi, 2 and 1/4 on the two other tasks."""
        for task, dense, sparse in (("ioi", 8, 8), ("docstring", 16, 8), ("ioi-long", 8, 32)):
            circuit_run(tmp_path / task / "dense", task=task, needed=dense)
            circuit_run(tmp_path / task / "sparse", task=task, model="sparse-small", sparse=True, needed=sparse)
        report = write_report([tmp_path / "ioi", tmp_path / "docstring", tmp_path / "ioi-long"], tmp_path / "all")
        text = lead_of(report.path)
        assert text.startswith("sparse-small needs 32 (32 to 32; 3 prompts)")
        assert "of the effect on ioi-long, and small needs 8 (8 to 8; 3 prompts): 0.25x" in text
        assert text.endswith(" 2 of 3 comparisons on this page show a difference.")
        assert data_of(report.path.parent)["first"] == {"task": "ioi-long", "gates": "edges, eap"}
        report = write_report([tmp_path / "ioi"], tmp_path / "none")
        assert lead_of(report.path).startswith("No difference between models is shown. sparse-small needs 8 (8 to 8;")
        assert data_of(report.path.parent)["first"] == {}

    def test_without_a_comparison_the_first_sentence_is_a_count(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "heads", level="heads", needed=4)
        report = write_report([tmp_path / "heads"], tmp_path / "report")
        assert lead_of(report.path) == "small needs 4 (4 to 4; 3 prompts) of 12 heads for 90% of the effect on ioi."

    def test_tests_and_stability_have_tables(self, pair: Path, tmp_path: Path) -> None:
        ends = {f"{name}{end}": 0.5 for name in ("overlap", "own", "transferred") for end in ("", "_low", "_high")}
        line = StabilityLine(other="templates", splits=2, prompts=24, **ends)
        outcomes = {
            name: HypothesisTest(test=name, statistic=0.5, p=p, rejected=p < 0.05, prompts=24)
            for name, p in (("equivalence", 0.01), ("independence", 0.5))
        }
        gate = DroppedGate(gate="<b>L0H1</b>", lost=0.25, low=0.125, high=0.5, p=0.75)
        tests = CircuitTests(schema_version=2, gates=1, dropped=(gate,), additions=50, prompts=16, **outcomes)
        runs = shutil.copytree(pair, tmp_path / "runs")
        for folder in runs.iterdir():
            save_stability(Stability(schema_version=2, k=8, lines=(line,)), folder)
            save_tests(tests, folder)
        text = write_report([runs], tmp_path / "report").path.read_text()
        effect = "0.50 (0.50 to 0.50)"
        assert text.count(f'<td>templates</td><td class="number">{effect}</td>') == 2  # dense and sparse
        assert text.count('<td class="number">24 prompts, 2 splits</td>') == 2
        assert "Equivalence: fails (p = 0.01; 24 prompts). Independence: passes (p = 0.5; 24 prompts)." in text
        assert "&lt;b&gt;L0H1&lt;/b&gt;" in text
        assert "+0.250 (+0.125 to +0.500)" in text


class TestViews:
    @pytest.mark.parametrize(
        "graph",
        [
            SMALL,
            Graph(3, 2, 2, parallel=True),
            Graph(2, 4, 2, coupled=True),
            Graph(4, 3, 1),
        ],
    )
    def test_an_edge_joins_when_it_comes_onto_a_path(self, graph: Graph) -> None:
        edges = graph.edges.nonzero()
        order = torch.randperm(len(edges), generator=torch.Generator().manual_seed(1))
        ranked = [(i, j) for i, j in edges[order].tolist()]
        joined = joins(graph, ranked)
        for k in range(1, len(ranked) + 1):
            kept = torch.zeros_like(graph.edges)
            kept[tuple(torch.tensor(ranked[:k]).T)] = True
            there = graph.on_a_path(kept[None])[0]
            assert [0 < join <= k for join in joined] == [bool(there[i, j]) for i, j in ranked]

    @pytest.mark.parametrize("graph", [Graph(2, 4, 2), Graph(2, 2, 2, parallel=True), Graph(2, 4, 2, coupled=True)])
    def test_an_edge_by_role_joins_when_it_comes_onto_a_path(self, graph: Graph) -> None:
        sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
        edges = graph.edges.expand(3, -1, -1).nonzero()
        order = torch.randperm(len(edges), generator=torch.Generator().manual_seed(3))
        ranked = [tuple(edge) for edge in edges[order].tolist()]
        joined = joins(graph, ranked, sees)
        for k in range(1, len(ranked) + 1, 5):
            kept = torch.zeros(3, *graph.edges.shape, dtype=torch.bool)
            kept[tuple(torch.tensor(ranked[:k]).T)] = True
            there = graph.on_a_path(kept[None], sees)[0]
            assert [0 < join <= k for join in joined] == [bool(there[edge]) for edge in ranked]

    def test_edges_that_never_join_say_0(self) -> None:
        ranked = [SMALL.edge("embed -> L0H0.q"), SMALL.edge("M1 -> logits")]
        assert joins(SMALL, ranked) == [0, 0]

    @pytest.mark.parametrize("graph", [SMALL, Graph(3, 2, 2, parallel=True), Graph(2, 4, 2, coupled=True)])
    def test_a_growing_circuit_is_what_is_on_a_path(self, graph: Graph) -> None:
        """The first edges of the growth are exactly those of the top k that are on a path, for every size shown."""
        edges = graph.edges.nonzero()
        order = torch.randperm(len(edges), generator=torch.Generator().manual_seed(2))
        ranked = [(i, j) for i, j in edges[order].tolist()]
        grown, circuits = growth(graph, ranked, most=len(ranked))
        assert [size for size, _ in circuits] == sorted({size for size, _ in circuits})
        for size, k in circuits:
            top = torch.zeros_like(graph.edges)
            top[tuple(torch.tensor(ranked[:k]).T)] = True
            on_a_path = graph.on_a_path(top[None])[0]
            assert set(grown[:size]) == {(i, j) for i, j in on_a_path.nonzero().tolist()}
        few, some = growth(graph, ranked, most=circuits[2][0])
        assert some == circuits[:3]
        assert few == grown[: circuits[2][0]]

    def test_a_ranking_without_a_path_has_no_circuit(self) -> None:
        assert growth(SMALL, [SMALL.edge("embed -> L0H0.q"), SMALL.edge("M1 -> logits")]) == ([], [])

    def test_sides_hold_the_edges_by_name(self, pair: Path) -> None:
        runs = read_runs([pair]).circuits
        (view,) = circuit_views(summarise(runs))
        assert [(side["label"], side["sparse"]) for side in view["sides"]] == [("small", False), ("sparse-small", True)]
        run = next(run for run in runs if not run.result.sparse)
        side = view["sides"][0]
        edges, circuits = growth(SMALL, run.top_edges(SMALL.n_edges))
        assert side["circuits"] == circuits
        for place, (i, j) in enumerate(edges[:20]):
            names = side["names"]
            end = names[side["destination"][place]] + (f".{side['input'][place]}" if side["input"][place] else "")
            assert (names[side["source"][place]], end) == (SMALL.source_names[i], SMALL.destination_names[j])
            assert side["score"][place] == pytest.approx(float(run.edge_scores[i, j]), rel=1e-4)

    def test_curves_name_the_head_that_each_gate_belongs_to(self, tmp_path: Path) -> None:
        scores = torch.zeros(3, 4)
        scores[1, 2], scores[2, 0] = -3.0, 2.0
        circuit_run(tmp_path / "heads", level="heads", scores=scores)
        circuit_run(tmp_path / "edges")
        runs = read_runs([tmp_path]).circuits
        heads, edges = curve_views(summarise(runs))
        assert heads["panels"][0]["models"][0]["order"][:2] == ["L1H2", "L2H0"]
        run = next(run for run in runs if run.has_graph)
        for (i, j), name in zip(run.top_edges(30), edges["panels"][0]["models"][0]["order"], strict=False):
            ends = SMALL.source_names[i], SMALL.destination_names[j].partition(".")[0]
            assert name in ends
            assert "H" in name or not any("H" in end for end in ends)

    def test_heads_by_score_with_roles_and_interference(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "heads", level="heads", described=("L1H2", "L0H3"))
        gate_run(tmp_path / "gate")
        gate_run(tmp_path / "other", model="other")
        runs = read_runs([tmp_path])
        roles = runs.roles[0].result.roles
        (task,) = task_views(summarise(runs.circuits), {str(i): run for i, run in enumerate(runs.roles)})
        (model,) = task["models"]
        values = [abs(score) for _, score in model["heads"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 12
        line = next(line for line in model["table"]["lines"] if line["head"] == "L1H2")
        (role,) = line["roles"]
        assert role["task"] == "syntax"
        for kind, score in role["scores"].items():
            assert score == pytest.approx(float(roles.kind(kind).mean(0)[1, 2]), abs=1e-3)
        (interfering,) = model["interfering"]
        mean = roles.interference.mean(0)
        assert {name for name, _ in interfering["heads"]} == {f"L{i}H{j}" for i, j in (mean >= 0.5).nonzero().tolist()}

    def test_a_head_attends_to_its_strongest_pairs(self, pair: Path) -> None:
        runs = read_runs([pair]).circuits
        (view,) = circuit_views(summarise(runs))
        for side, run in zip(view["sides"], sorted(runs, key=lambda run: run.result.sparse), strict=True):
            prompt = run.prompts[0]
            weights = prompt.attention[1, 2].float()
            if prompt.open is not None:
                weights = weights * prompt.open[1, 2]
            last = weights[-1].clone()
            last[0] = 0
            shown = side["attends"][side["names"].index("L1H2")]
            best = int(last.argmax())
            assert shown[0][:2] == [TOKENS[-1], TOKENS[best]]
            assert shown[0][2] == pytest.approx(float(last[best]), abs=1e-3)

    @pytest.mark.parametrize(("source", "reason"), [("mean", "read the source mean"), ("corrupt", "earlier version")])
    def test_why_a_run_has_no_probabilities(self, source: str, reason: str, tmp_path: Path) -> None:
        folder = circuit_run(tmp_path / "run")
        for name, change in (("result.json", {"source": source}), ("example.json", {"parts": []})):
            record = json.loads((folder / name).read_text())
            (record["settings"] if name == "result.json" else record["prompts"][0]).update(change)
            (folder / name).write_text(json.dumps(record))
        [view], _ = attention_views(summarise(read_runs([folder]).circuits))
        [sentence] = view["without"]
        assert sentence.startswith("edges, eap: ")
        assert reason in sentence
        assert view["prompts"][0]["predictions"] == []

    def test_patterns_are_the_attention(self, pair: Path) -> None:
        runs = read_runs([pair]).circuits
        views, patterns = attention_views(summarise(runs))
        for view, (pattern,), run in zip(views, patterns, sorted(runs, key=lambda run: run.result.sparse), strict=True):
            assert view["prompts"][0]["tokens"] == TOKENS
            prompt, length = run.prompts[0], len(TOKENS)
            numbers = np.frombuffer(base64.b64decode(pattern["weights"]), "<u2").reshape(3, 4, -1) / 65535
            pairs = [(query, key) for query in range(length) for key in range(query + 1)]
            for place, (query, key) in enumerate(pairs):
                assert numbers[..., place] == pytest.approx(prompt.attention[..., query, key].numpy(), abs=1e-5)
            if run.result.sparse:
                gates = np.frombuffer(base64.b64decode(pattern["open"]), "u1").reshape(3, 4, -1)
                assert gates[2, 3].tolist() == [int(prompt.open[2, 3, query, key]) for query, key in pairs]


class TestFiles:
    def test_names_are_data(self, page: Path) -> None:
        text = (page / "index.html").read_text()
        assert html.escape(HOSTILE).replace("&#x27;", "&#39;") in text
        scripts = re.findall(r"<script(.*?)>(.*?)</script>", text, re.S)
        assert all(re.fullmatch(r' src="[a-z./-]+" defer', attributes) and not inside for attributes, inside in scripts)
        assert "<img src=x" not in text
        for path in (page / "data").iterdir():
            assert not set("<>&") & set(path.read_text())
        assert data_of(page)["circuits"][0]["sides"][0]["label"] == HOSTILE

    def test_the_policy_allows_the_folder_only(self, page: Path) -> None:
        text = (page / "index.html").read_text()
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == "'self' file:"  # Firefox: files on disk are not of the page's origin
        others = ("plotly.min.js", "dagre.min.js")
        own = [path for path in page.iterdir() if path.suffix in (".html", ".css", ".js") and path.name not in others]
        assert len(own) > 9
        for path in own:
            text = path.read_text().replace(html.escape(HOSTILE), "").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//[a-z]+\.", text)
            assert "innerHTML" not in path.read_text()

    def test_everything_the_page_names_is_there(self, page: Path) -> None:
        text = (page / "index.html").read_text()
        files = [name for name in re.findall(r'(?:src|href)="([^"#]+)"', text) if not name.startswith("#")]
        assert len(files) > 20
        assert [name for name in files if not (page / name).is_file()] == []
        ids = set(re.findall(r'id="([^"]+)"', text))
        assert set(re.findall(r'(?:href="#|aria-labelledby="|for=")([^"]+)"', text)) <= ids

    def test_every_figure_has_its_data_and_images(self, page: Path) -> None:
        stems = {path.stem for path in (page / "figures").iterdir()}
        kinds = {stem: {path.suffix for path in (page / "figures").glob(f"{stem}.*")} for stem in stems}
        assert len(stems) >= 6
        assert all(suffixes == {".csv", ".png", ".svg"} for suffixes in kinds.values())
        (kept,) = (page / "figures").glob("*heads-kept*.csv")
        with kept.open(newline="") as file:
            rows = list(csv.DictReader(file))
        expected = curve("heads", 12, 8)
        effects = [float(row["effect"]) for row in rows if row["ranking"] == "absolute"]
        assert effects == pytest.approx(expected.effect.tolist(), abs=1e-5)
        assert [float(row["kept"]) for row in rows if row["ranking"] == "random"] == expected.kept.tolist()

    def test_other_formats_are_made_on_demand(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "run", level="heads")
        page = write_report([tmp_path / "run"], tmp_path / "report", ["pdf", "svg"]).path
        for stem in {path.stem for path in (page.parent / "figures").iterdir()}:
            for kind in ("csv", "png", "pdf", "svg"):
                assert (page.parent / "figures" / f"{stem}.{kind}").is_file()
                assert f'download="{stem}.{kind}" href="figures/{stem}.{kind}"' in page.read_text()
        with pytest.raises(GatelensError, match="no figure format 'jpg'"):
            write_report([tmp_path / "run"], tmp_path / "report", ["jpg"])

    def test_the_cost_of_sparsity_has_its_data(self, page: Path) -> None:
        (table,) = (page / "figures").glob("*loss-against-open-keys-per-query.csv")
        with table.open(newline="") as file:
            measures = {row["measure"]: float(row["value"]) for row in csv.DictReader(file)}
        losses = {"book dense loss": 3.0, "book above dense": 0.01, "book kl": 0.1}
        assert measures == {**losses, "book open": 0.2, "book keys per query": 2.5}

    def test_a_single_file_contains_everything_and_runs_only_its_own_scripts(self, tmp_path: Path) -> None:
        circuit_run(tmp_path / "run", model=HOSTILE, task=HOSTILE)
        out = tmp_path / "made" / "report.html"
        report = write_report([tmp_path / "run"], out, single_file=True)
        assert report.path == out
        assert [path.name for path in out.parent.iterdir()] == ["report.html"]
        text = out.read_text()
        scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
        assert text.count("<script") == len(scripts) > 10
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
        hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
        allowed = " ".join(f"'sha256-{value}'" for value in hashes)
        assert f"script-src {allowed};" in policy
        markup = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
        assert markup.count("Permission is hereby granted") == 2  # dagre and graphlib
        assert all(name.startswith(("data:", "#")) for name in re.findall(r'(?:src|href)="([^"]+)"', markup))
        write_report([tmp_path / "run"], out, single_file=True)  # an earlier report is replaced
        out.write_text("my thesis")
        with pytest.raises(GatelensError, match="is not a report of gatelens"):
            write_report([tmp_path / "run"], out, single_file=True)
        with pytest.raises(GatelensError, match="is a folder: give the name of a file"):
            write_report([tmp_path / "run"], tmp_path, single_file=True)

    def test_scripts_of_others_are_listed_with_their_licences(self) -> None:
        """The list is a CycloneDX SBOM. All scripts are under the MIT licence, whose text is beside them or in them."""
        folder = Path(gatelens.report.page.__file__).parent / "assets" / "vendor"
        sbom = json.loads((folder / "sbom.cdx.json").read_text())
        assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
        files = [component for component in sbom["components"] if component["type"] == "file"]
        assert {file["name"] for file in files} == {path.name for path in folder.glob("*.js")}
        packages = [component for component in sbom["components"] if component["type"] == "library"]
        for file in files:
            assert file["hashes"] == [
                {"alg": "SHA-256", "content": hashlib.sha256((folder / file["name"]).read_bytes()).hexdigest()}
            ]
            for package in file["components"]:
                [licence] = [link["url"] for link in package["externalReferences"] if link["type"] == "license"]
                assert "Permission is hereby granted" in (folder / licence).read_text()
                packages.append(package)
        assert {package["name"] for package in packages} == {"dagre", "graphlib", "plotly.js"}
        assert all(package["licenses"] == [{"license": {"id": "MIT"}}] for package in packages)
        assert all(package["purl"].startswith("pkg:npm/") for package in packages)
        known = {sbom["metadata"]["component"]["bom-ref"], *(package["bom-ref"] for package in packages)}
        for entry in sbom["dependencies"]:
            assert {entry["ref"], *entry["dependsOn"]} <= known
        assert "Licensed under the MIT license" in gatelens.report.page._plotly().read_text(encoding="utf-8")[:500]

    def test_scripts_cannot_be_left(self) -> None:
        text = as_script({"a": "</script><!-- & \u2028 ü"})
        assert not set("<>&\u2028") & set(text)
        assert json.loads(text) == {"a": "</script><!-- & \u2028 ü"}


def test_a_run_of_elsewhere_does_not_tell_the_path_of_this_machine(page: Path) -> None:
    text = (page / "index.html").read_text()
    rows = re.findall(r'<th scope="row">folder</th><td>([^<]*)</td>', text)
    assert len(rows) == 4
    assert all(row.count("/") == 1 and not row.startswith("/") for row in rows)


class TestWriting:
    def test_an_earlier_report_is_replaced_and_other_folders_are_not(self, pair: Path, tmp_path: Path) -> None:
        out = tmp_path / "report"
        write_report([pair / "dense"], out)
        (out / "left-over.txt").write_text("old")
        write_report([pair / "sparse"], out)
        assert not (out / "left-over.txt").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["report"]
        other = tmp_path / "thesis"
        other.mkdir()
        (other / "chapter.txt").write_text("mine")
        with pytest.raises(GatelensError, match="is not a report of gatelens"):
            write_report([pair], other)
        assert (other / "chapter.txt").read_text() == "mine"

    def test_the_figures_are_announced_before_they_are_drawn(self, pair: Path, tmp_path: Path) -> None:
        announced: list[tuple[int, int, bool]] = []
        out = tmp_path / "report"
        report = write_report([pair], out, announce=lambda *numbers: announced.append((*numbers, out.exists())))
        assert announced == [(2, report.figures, False)]

    def test_nothing_to_report_writes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(GatelensError, match=r"nothing to report.*empty does not contain a run"):
            write_report([tmp_path / "empty"], tmp_path / "report")
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]

    def test_the_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        circuit_run(tmp_path / "runs" / "good", level="heads")
        bad = tmp_path / "runs" / "bad"
        bad.mkdir()
        (bad / "asked.json").write_text("{}")

        def run(*words: str) -> tuple[int, str]:
            monkeypatch.setattr(sys, "argv", ["gatelens", "report", *words])
            with pytest.raises(SystemExit) as ended:
                main()
            return int(ended.value.code or 0), capsys.readouterr().err

        assert run(str(tmp_path / "runs")) == (
            0,
            f"gatelens: {bad} holds a run of the kind None, which a report does not show.\n",
        )
        assert (tmp_path / "report" / "index.html").exists()
        code, error = run(str(bad), "--out", str(tmp_path / "other"))
        assert code == 2
        assert error.startswith("gatelens: there is nothing to report.")
        assert not (tmp_path / "other").exists()

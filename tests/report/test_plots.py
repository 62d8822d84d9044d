"""Every result draws itself, on a new figure or on the user's axis, and shows itself in a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import pytest
import torch
from copying import copying_task
from families import sparse_model, tiny
from made_runs import gate_run
from matplotlib.figure import Figure
from text_boxes import faults
from toys import planted, planted_task, random_task

import gatelens
from gatelens import (
    CircuitSettings,
    ContrastResult,
    CurveSettings,
    GatelensError,
    HeadRoles,
    HeldOutRelation,
    RelationsResult,
    RelationsSettings,
    TwoTaskSettings,
)
from gatelens.gates.best_attention import BestAttentionScores
from gatelens.gates.roles import Contrast, ContrastAccuracy
from gatelens.measures.counts import Interval, Multiplier, Sample
from gatelens.measures.curves import Curve
from gatelens.runtime.shown import Shown, html_table


def results() -> dict[str, Any]:
    """One result of every class that can be plotted."""
    model, task = planted(), planted_task()
    heads, edges = gatelens.attribute_heads(model, task), gatelens.attribute_edges(model, task)
    settings = CircuitSettings(points=4, random_points=3, sample=0, describe=2, method="eap")
    sparse, _ = sparse_model("llama")

    def curve(k: int) -> Curve:
        """A curve that reaches 0.9 with k gates of 4."""
        effect = [0.0, *([0.1] * (k - 1)), *([1.0] * (5 - k))]
        ends = torch.zeros(1, 6), torch.ones(1, 6)
        return Curve(
            "heads", 4, list(range(5)), torch.arange(5.0), torch.tensor(effect)[None, :, None].expand(1, 5, 6), *ends
        )

    random = random_task(n=2)
    with TemporaryDirectory() as folder:
        roles = gatelens.load_roles(gate_run(Path(folder) / "roles"))
    return {
        "task": task,
        "responses": copying_task(),
        "head scores": heads,
        "edge scores": edges,
        "scores of edges by role": gatelens.score_gates("edges-by-role", tiny("llama"), random, "eap"),
        "attention scores": gatelens.attribute_attention(model, task),
        "best attention scores": BestAttentionScores.of(gatelens.attribute_attention(model, task), most=8),
        "curve": gatelens.explained_effect(model, task, edges, CurveSettings(points=4, random_points=3)),
        "multiplier": gatelens.multiplier(curve(2), curve(1)),
        "open multiplier": Multiplier(2.0, Interval(1.2, None), (Sample(8), Sample(8)), True),
        "circuit result": gatelens.find_circuit(model, task, settings),
        "circuit of edges": edges.circuit(8),
        "circuit of heads": heads.circuit(3),
        "explanation": edges.circuit(8).explain(model, task),
        "table": gatelens.describe(sparse, random, 3, dense=tiny("llama")),
        "attention": gatelens.attention(sparse, random, "L1H1"),
        "roles": roles.roles,
        "roles result": roles,
        "ablation": roles.curves[0],
        "contrast result": ContrastResult("tiny", "keep <b>", "lose", TwoTaskSettings(), contrast(), 1.0),
        "relations result": RelationsResult(
            "tiny",
            RelationsSettings(seeds=2),
            [
                HeldOutRelation(relation, *ways, contrast())
                for ways in (("examples", "instruction"), ("instruction", "examples"))
                for relation in ("antonym", "capital")
            ],
            1.0,
        ),
    }


def contrast() -> Contrast:
    """Two seeds of two layers of two heads."""
    gates = torch.tensor([[[1.0, 0.0], [0.25, 0.5]], [[0.5, 0.0], [0.75, 0.5]]])
    keep, lose = torch.tensor([-1.0, -2.0]), torch.tensor([-8.0, -9.0])
    accuracy = ContrastAccuracy(torch.tensor([0.75, 1.0]), torch.tensor([0.0, 0.25]), 0.875, 0.625)
    return Contrast(gates, torch.zeros(3, 2), keep, lose, -1.25, -2.5, accuracy)


RESULTS = results()


@pytest.mark.parametrize("name", RESULTS)
def test_a_figure_that_a_notebook_shows(name: str) -> None:
    figure = RESULTS[name].plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert any(axis.has_data() or axis.texts for axis in figure.axes)
    assert faults(figure) == []


@pytest.mark.parametrize("name", RESULTS)
def test_the_axis_of_the_user(name: str) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert RESULTS[name].plot(ax=right) is figure
    assert not left.has_data()
    assert right.has_data() or right.texts or right.patches


def test_matplotlib_is_left_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    RESULTS["curve"].plot()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", RESULTS)
def test_tables(name: str) -> None:
    result = RESULTS[name]
    records, page = result.records(), result._repr_html_()
    assert list(result.to_pandas().columns) == list(dict.fromkeys(key for record in records for key in record))
    assert len(result.to_pandas()) == len(records) > 0
    assert page.count("<tr>") == 1 + min(len(records), 20)
    assert repr(result) == f"{type(result).__name__}({result.headline()})"


def test_the_numbers_in_the_tables() -> None:
    curve, scores = RESULTS["curve"], RESULTS["head scores"]
    assert [record["effect"] for record in curve.records()] == pytest.approx(curve.effect.tolist())
    assert [record["gate"] for record in scores.records()] == [name for _, name, _ in scores.top(8)]
    roles: HeadRoles = RESULTS["roles"]
    best = roles.records()[0]
    assert best["facilitation"] == pytest.approx(float(roles.facilitation.mean(0).max()))
    line = RESULTS["curve"].plot().axes[0].get_lines()[0]
    assert line.get_ydata().tolist() == pytest.approx(curve.effect[curve.kept > 0].tolist())


def test_the_numbers_of_contrastive_gates() -> None:
    result: ContrastResult = RESULTS["contrast result"]
    assert result.records() == [
        {"head": "L0H0", "gate": 0.75, "lowest": 0.5, "highest": 1.0},
        {"head": "L1H0", "gate": 0.5, "lowest": 0.25, "highest": 0.75},
        {"head": "L1H1", "gate": 0.5, "lowest": 0.5, "highest": 0.5},
        {"head": "L0H1", "gate": 0.0, "lowest": 0.0, "highest": 0.0},
    ]
    assert result.headline() == "keep keep <b> (log p -1.25 -> -1.50), lose lose (log p -2.50 -> -8.50) in tiny"
    assert "<b>" not in result._repr_html_()
    assert result.plot().axes[0].images[0].get_array().tolist() == [[0.75, 0.0], [0.5, 0.5]]


def test_one_way_of_asking() -> None:
    result: RelationsResult = RESULTS["relations result"]
    kept, lost = result.records()[:2]
    assert (kept["role"], kept["asked by"], kept["accuracy"], kept["lowest"]) == ("keep", "examples", 0.875, 0.75)
    assert (lost["role"], lost["asked by"], lost["accuracy"], lost["highest"]) == ("lose", "instruction", 0.125, 0.25)
    [axis] = result.plot(keep="instruction").axes
    assert axis.get_title().split() == ["keep", "instruction,", "lose", "examples"]
    assert len(result.plot().axes) == 2
    with pytest.raises(GatelensError, match="the ways are examples, instruction"):
        result.plot(keep="song")


def test_one_kind_of_role() -> None:
    roles: HeadRoles = RESULTS["roles"]
    image = roles.plot(kind="interference").axes[0].images[0].get_array()
    assert torch.tensor(image.tolist()) == pytest.approx(roles.interference.mean(0))


def test_text_is_data() -> None:
    page = html_table("<b>", [{"<i>": "<script>alert(1)</script>", "n": 0.123456, "none": None}])
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    assert "0.1235" in page
    assert html_table("t", [{"a": i} for i in range(30)]).count("<tr>") == 21


def test_pandas_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GatelensError, match="to_pandas needs pandas"):
        RESULTS["curve"].to_pandas()
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(GatelensError, match="to_networkx needs networkx"):
        RESULTS["circuit of edges"].to_networkx()


def test_every_shown_class_has_a_figure() -> None:
    """A name in `drawn_by` that does not exist would only be noticed when somebody plots."""

    def all_classes(cls: type) -> list[type]:
        return [each for child in cls.__subclasses__() for each in (child, *all_classes(child))]

    drawn = {type(result) for result in RESULTS.values()}
    concrete = [
        cls
        for cls in all_classes(Shown)
        if cls.__module__.startswith("gatelens.") and not getattr(cls, "__abstractmethods__", None)
    ]
    assert {cls.__name__ for cls in concrete if cls not in drawn} <= {"SharedScores"}

"""Circuits of saved runs in the formats of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import run as gatelens_command

from gatelens import CircuitSettings, GatelensError, Model, find_circuit, load_circuit
from gatelens.jobs.export import export_circuit
from gatelens.measures.exchange import read_graph


@pytest.fixture(scope="module")
def run(trained: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "induction edges"
    settings = CircuitSettings(level="edges", method="eap", n=3, points=9, random_points=0, sample=0, allow_noise=True)
    find_circuit(trained, "induction", settings, out=folder, options={"length": 5})
    return folder


@pytest.mark.parametrize("ending", ["json", "pt"])
def test_graph_files(run: Path, ending: str, tmp_path: Path) -> None:
    result = load_circuit(run, scores=True)
    own_scores, own_circuit = read_graph(run / "circuit.json", result.graph)
    torch.testing.assert_close(own_scores.scores, result.scores[0].scores.float(), atol=1e-6, rtol=1e-5)
    scores, circuit = read_graph(export_circuit(run, tmp_path / "new" / f"graph.{ending}"), result.graph)
    torch.testing.assert_close(scores.scores, own_scores.scores)
    assert torch.equal(circuit, own_circuit)
    _, circuit = read_graph(export_circuit(run, tmp_path / f"top.{ending}", k=40), result.graph)
    names = {name for edge, name, _ in result.scores[0].top(40) if circuit[edge]}
    assert len(names) == int(circuit.sum())  # nothing but the top 40, without edges that are on no path


def test_the_viewers_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gatelens_command(monkeypatch, "export", str(run), str(tmp_path / "graphs"), "--k", "40") == 0
    graph = json.loads((tmp_path / "graphs" / "induction-edges.json").read_text())
    prompt = json.loads((run / "example.json").read_text())["prompts"][0]
    assert graph["metadata"]["prompt_tokens"][:-1] == prompt["tokens"]
    assert graph["nodes"][-1]["token_prob"] == prompt["probability"]
    assert graph["links"]


def test_runs_that_have_nothing_to_export(run: Path, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="is not a complete run"):
        export_circuit(tmp_path, tmp_path / "graph.pt")
    with pytest.raises(GatelensError, match="k is 0"):
        export_circuit(run, tmp_path / "graph.pt", k=0)
    (tmp_path / "result.json").write_text((run / "result.json").read_text())
    with pytest.raises(GatelensError, match="has no edge circuit"):
        export_circuit(tmp_path, tmp_path / "graph.pt")
    assert not (tmp_path / "graph.pt").exists()

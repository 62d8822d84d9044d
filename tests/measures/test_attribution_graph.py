"""Edge circuits as attribution graphs: the fields that circuit-tracer's viewer reads, and weights by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gatelens import GatelensError
from gatelens.gates.edges import EdgeScores
from gatelens.measures.attribution_graph import ALL_POSITIONS, link_weights, write_attribution_graph
from gatelens.measures.example import PromptRecord
from gatelens.model.graph import Graph

GRAPH = Graph(2, 4, 2)  # heads share keys and values
PROMPT = PromptRecord(tokens=("Mary", " and"), answer=" John", probability=0.25)
EDGES = {
    "embed -> L0H1.q": 1.0,
    "embed -> L0KV0.k": 4.0,  # shared by L0H0, which no edge leaves, and L0H1
    "L0H1 -> L1H2.q": 0.5,
    "L0H1 -> L1KV1.v": -3.0,  # shared by L1H2 and L1H3
    "L1H2 -> logits": 2.0,
    "embed -> M1": 7.0,  # no edge leaves M1
}
LINKS = {("embed", "L0H1"): 1 + 4 / 2, ("L0H1", "L1H2"): 0.5 - 3 / 2, ("L1H2", "logits"): 2.0}


def circuit() -> tuple[EdgeScores, torch.Tensor]:
    scores, kept = torch.full(GRAPH.edges.shape, 9.0) * GRAPH.edges, torch.zeros(GRAPH.edges.shape, dtype=torch.bool)
    for name, score in EDGES.items():
        scores[GRAPH.edge(name)], kept[GRAPH.edge(name)] = score, True
    return EdgeScores(scores, GRAPH, "by hand"), kept


def written(folder: Path, slug: str = "a-graph") -> Any:
    return json.loads(write_attribution_graph(folder, slug, "tiny", *circuit(), PROMPT).read_text())


def test_weights_are_sums_over_q_k_and_v() -> None:
    weights = link_weights(*circuit())
    nodes = [*GRAPH.source_names, "logits"]
    sums = {(nodes[i], nodes[j]): float(weights[i, j]) for i, j in weights.nonzero().tolist()}
    assert sums == pytest.approx(LINKS)


def test_what_is_written(tmp_path: Path) -> None:
    graph = written(tmp_path)
    labels = {node["node_id"]: node["clerp"] for node in graph["nodes"]}
    assert list(labels.values()) == ["embed", "L0H1", "L1H2", 'Output " John" (p=0.250)']
    links = {(labels[link["source"]], labels[link["target"]]): link["weight"] for link in graph["links"]}
    assert list(links.values()) == pytest.approx(list(LINKS.values()))
    assert graph["metadata"]["prompt_tokens"] == ["Mary", " and", ALL_POSITIONS]
    assert {node["ctx_idx"] for node in graph["nodes"]} == {2}
    assert [(node["layer"], node["feature_type"]) for node in graph["nodes"]] == [
        ("E", "embedding"),
        ("0", "cross layer transcoder"),
        ("1", "cross layer transcoder"),
        ("3", "logit"),
    ]
    # The strongest node comes first in the sum of influences: embed 3, logits' source 2, L0H1 1.
    assert [node["influence"] for node in graph["nodes"][:3]] == pytest.approx([3 / 6, 6 / 6, 5 / 6])


def test_the_viewer_lists_every_graph_once(tmp_path: Path) -> None:
    for slug in ("a", "b", "a"):
        written(tmp_path, slug)
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [graph["slug"] for graph in listed] == ["b", "a"]


def test_circuit_tracers_own_classes_accept_it(tmp_path: Path) -> None:
    models = pytest.importorskip("circuit_tracer.frontend.graph_models", reason="circuit-tracer is not installed")
    graph = models.Model.model_validate(written(tmp_path))
    assert len(graph.nodes) == 4
    assert len(graph.links) == 3


def test_names_and_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match=r"the slug '\.\./a' cannot name a graph"):
        written(tmp_path, "../a")
    unknown = PromptRecord(tokens=("Mary",), answer=" John")
    with pytest.raises(GatelensError, match="lacks the answer's probability"):
        write_attribution_graph(tmp_path, "a", "tiny", *circuit(), unknown)

"""Edge circuits in the JSON graph format of EAP-IG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import GatelensError
from gatelens.gates.edges import EdgeScores
from gatelens.measures.exchange import read_graph, write_graph
from gatelens.measures.top_k import Circuits
from gatelens.model.graph import Graph

GRAPHS = {"plain": Graph(3, 2, 2), "shared keys": Graph(2, 4, 2), "parallel": Graph(2, 2, 2, parallel=True)}


def some(graph: Graph) -> tuple[EdgeScores, torch.Tensor]:
    torch.manual_seed(0)
    scores = torch.randn(graph.edges.shape) * graph.edges
    return EdgeScores(scores, graph, "by hand"), (torch.rand(graph.edges.shape) < 0.3) & graph.edges


@pytest.mark.parametrize("name", GRAPHS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]
    scores, kept = some(graph)
    write_graph(tmp_path / "graph.json", scores, kept, 48)
    found, circuit = read_graph(tmp_path / "graph.json", graph)
    torch.testing.assert_close(found.scores, scores.scores)
    assert torch.equal(circuit, kept)
    assert found.measured is None
    assert found.method == "read from graph.json"


def test_what_is_written(tmp_path: Path) -> None:
    graph = GRAPHS["plain"]
    scores, kept = some(graph)
    write_graph(tmp_path / "graph.json", scores, kept, 48)
    data = json.loads((tmp_path / "graph.json").read_text())
    assert data["cfg"] == {"n_layers": 3, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 48}
    nodes = ["input", "logits", *(f"a{n}.h{h}" for n in range(3) for h in range(2)), *(f"m{n}" for n in range(3))]
    assert sorted(data["nodes"]) == sorted(nodes)
    assert len(data["edges"]) == graph.n_edges
    for name, ours in (
        ("a0.h1->a2.h0<k>", "L0H1 -> L2H0.k"),
        ("input->m1", "embed -> M1"),
        ("m2->logits", "M2 -> logits"),
    ):
        place = graph.edge(ours)
        assert data["edges"][name] == {
            "score": pytest.approx(float(scores.scores[place])),
            "in_graph": bool(kept[place]),
        }
    assert data["nodes"]["a0.h1"]["in_graph"] is bool(kept[graph.source_names.index("L0H1")].any())


def test_shared_keys_are_written_for_every_head(tmp_path: Path) -> None:
    graph = GRAPHS["shared keys"]
    scores, kept = some(graph)
    write_graph(tmp_path / "graph.json", scores, kept, 48)
    edges = json.loads((tmp_path / "graph.json").read_text())["edges"]
    assert len(edges) == Graph(2, 4, 4).n_edges  # as the other side counts
    place = graph.edge("M0 -> L1KV1.v")
    for head in (2, 3):
        assert edges[f"m0->a1.h{head}<v>"]["score"] == pytest.approx(float(scores.scores[place]))


def by_hand(**changes: Any) -> dict[str, Any]:
    """A graph as EAP-IG writes it, with some of the edges only."""
    return {
        "cfg": {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 48},
        "nodes": {"input": {"in_graph": True}, "logits": {"in_graph": True}},
        "edges": {
            "input->a0.h0<q>": {"score": 0.5, "in_graph": True},
            "input->a0.h0<k>": {"score": 1.0, "in_graph": False},
            "input->a0.h1<k>": {"score": 3.0, "in_graph": True},
            "a0.h3->m1": {"score": -2, "in_graph": True},
            "m1->logits": {"score": None, "in_graph": False},
        },
        **changes,
    }


def test_a_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(by_hand()))
    graph = GRAPHS["shared keys"]
    scores, kept = read_graph(tmp_path / "graph.json", graph)
    wanted = {"embed -> L0H0.q": 0.5, "embed -> L0KV0.k": 2.0, "L0H3 -> M1": -2.0}  # k: the mean of two heads
    for name, score in wanted.items():
        assert scores.scores[graph.edge(name)] == score
        assert kept[graph.edge(name)]  # k: one of two heads is in the graph
    assert scores.scores.count_nonzero() == kept.sum() == 3


def test_a_circuit_of_others_can_be_evaluated(tmp_path: Path) -> None:
    model, task = tiny("llama", num_hidden_layers=2), random_task()
    graph = Graph.of(model.anatomy)
    (tmp_path / "graph.json").write_text(json.dumps(by_hand()))
    scores, _ = read_graph(tmp_path / "graph.json", graph)
    ours = Circuits.of(model, task, scores)
    assert ours.metric(0, [0, 3, graph.n_edges]).shape == (3, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not a JSON graph"),
        ("[1]", "is not a circuit"),
        ('{"cfg": {}, "edges": []}', "is not a circuit"),
        (by_hand(cfg={"n_layers": 3, "n_heads": 4}), "3 layers of 4 heads, but this model has 2 layers of 4 heads"),
        (by_hand(cfg={}), "None layers"),
        (by_hand(edges={"input->a9.h0<q>": {"score": 1.0}}), "an edge 'input->a9.h0<q>' that this model does not have"),
        (by_hand(edges={"nonsense": {"score": 1.0}}), "an edge 'nonsense'"),
        (by_hand(edges={"input->m0": 3}), "an edge 'input->m0'"),
        (by_hand(edges={"input->m0": {"score": "high"}}), "whose score is 'high'"),
        (by_hand(edges={"input->m0": {"score": float("nan")}}), "whose score is nan"),
        (by_hand(edges={"m1->m0": {"score": 1.0}}), "an edge 'm1->m0'"),
    ],
)
def test_files_that_do_not_fit(data: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(GatelensError, match=message):
        read_graph(path, GRAPHS["shared keys"])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="no file"):
        read_graph(tmp_path / "graph.json", GRAPHS["plain"])

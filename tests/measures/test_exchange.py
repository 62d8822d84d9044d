"""Edge circuits in the graph files of EAP-IG: against what its documentation and code say, and its own reader."""

from __future__ import annotations

import json
import os
import pickle
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
from gatelens.methods.attribution import attribute_edges
from gatelens.model.graph import Graph

GRAPHS = {"plain": Graph(3, 2, 2), "shared keys": Graph(2, 4, 2), "parallel": Graph(2, 2, 2, parallel=True)}


def some(graph: Graph) -> tuple[EdgeScores, torch.Tensor]:
    torch.manual_seed(0)
    scores = torch.randn(graph.edges.shape) * graph.edges
    return EdgeScores(scores, graph, "by hand"), (torch.rand(graph.edges.shape) < 0.3) & graph.edges


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("ending", ["json", "pt"])
def test_round_trip(name: str, ending: str, tmp_path: Path) -> None:
    graph, path = GRAPHS[name], tmp_path / f"graph.{ending}"
    scores, kept = some(graph)
    write_graph(path, scores, kept, 48)
    again, circuit = read_graph(path, graph)
    torch.testing.assert_close(again.scores, scores.scores)
    assert torch.equal(circuit, kept)
    assert again.measured is None
    assert again.method == f"read from graph.{ending}"


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


def test_a_node_is_in_the_graph_if_edges_enter_and_leave_it(tmp_path: Path) -> None:
    """As EAP-IG does: the input needs no edge that enters it, and the logits are always there."""
    graph = GRAPHS["plain"]
    scores, _ = some(graph)
    kept = torch.zeros(graph.edges.shape, dtype=torch.bool)
    for edges, wanted in (
        ([], {"logits"}),
        (["M0 -> logits"], {"logits"}),
        (["embed -> M0", "M0 -> L1H0.v"], {"input", "m0", "logits"}),
        (["embed -> L0H1.k", "L0H1 -> logits"], {"input", "a0.h1", "logits"}),
    ):
        circuit = kept.clone()
        for name in edges:
            circuit[graph.edge(name)] = True
        write_graph(tmp_path / "graph.json", scores, circuit, 48)
        nodes = json.loads((tmp_path / "graph.json").read_text())["nodes"]
        assert {name for name, node in nodes.items() if node["in_graph"]} == wanted
        write_graph(tmp_path / "graph.pt", scores, circuit, 48)
        data = torch.load(tmp_path / "graph.pt", weights_only=True)
        in_graph = [name for name, node in zip(data["src_nodes"], data["nodes_in_graph"], strict=True) if node]
        assert set(in_graph) == wanted - {"logits"}


def test_shared_scores_are_divided_among_the_heads(tmp_path: Path) -> None:
    """Gradients add up, so the parts that every head is given sum to the score of the shared input."""
    graph = GRAPHS["shared keys"]
    scores, kept = some(graph)
    write_graph(tmp_path / "graph.json", scores, kept, 48)
    edges = json.loads((tmp_path / "graph.json").read_text())["edges"]
    assert len(edges) == Graph(2, 4, 4).n_edges  # as the other side counts
    place = graph.edge("M0 -> L1KV1.v")
    for head in (2, 3):
        assert edges[f"m0->a1.h{head}<v>"]["score"] == pytest.approx(float(scores.scores[place]) / 2)
    place = graph.edge("M0 -> L1H3.q")
    assert edges["m0->a1.h3<q>"]["score"] == pytest.approx(float(scores.scores[place]))


@pytest.mark.parametrize("name", GRAPHS)
def test_matrices_are_ordered_as_eap_ig_orders_them(name: str, tmp_path: Path) -> None:
    """The numbers of sources and destinations are those that EAP-IG computes from names."""
    graph = GRAPHS[name]
    scores, kept = some(graph)
    write_graph(tmp_path / "graph.pt", scores, kept, 48)
    write_graph(tmp_path / "graph.json", scores, kept, 48)
    data = torch.load(tmp_path / "graph.pt", weights_only=True)
    n_layers, n_heads = graph.n_layers, graph.n_heads
    assert data["edges_scores"].shape == (1 + n_layers * (n_heads + 1), 1 + n_layers * (3 * n_heads + 1))

    def number(node: str, per_layer: int, before: int) -> int:
        layer, _, head = node[1:].partition(".h")
        return int(layer) * per_layer + before + (int(head) if head else 0)

    def source(node: str) -> int:
        return 0 if node == "input" else 1 + number(node, n_heads + 1, n_heads * (node[0] == "m"))

    def destination(node: str) -> int:
        node, _, kind = node.rstrip(">").partition("<")
        before = n_heads * "qkv".index(kind) if kind else 3 * n_heads
        return -1 if node == "logits" else number(node, 3 * n_heads + 1, before)

    edges = json.loads((tmp_path / "graph.json").read_text())["edges"]
    for edge, wanted in edges.items():
        ends = edge.split("->")
        place = source(ends[0]), destination(ends[1])
        assert float(data["edges_scores"][place]) == pytest.approx(wanted["score"])
        assert bool(data["edges_in_graph"][place]) is wanted["in_graph"]
    assert int(data["edges_scores"].count_nonzero()) == len(edges)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("ending", ["json", "pt"])
def test_the_reader_of_eap_ig(name: str, ending: str, tmp_path: Path) -> None:
    """Its package is not in any index, so this runs where somebody has installed it from its repository."""
    their_graph = pytest.importorskip("eap.graph", reason="EAP-IG's package is not installed").Graph
    graph, path = GRAPHS[name], tmp_path / f"graph.{ending}"
    scores, kept = some(graph)
    kept = graph.on_a_path(kept[None])[0]
    write_graph(path, scores, kept, 48)
    theirs = their_graph.from_json(str(path)) if ending == "json" else their_graph.from_pt(str(path))
    assert theirs.in_graph.sum() == sum(kept[:, j].sum() for j in shared_columns(graph))
    nodes = theirs.nodes_in_graph.clone()
    theirs.prune()  # nothing to remove: they see the same paths
    assert torch.equal(theirs.nodes_in_graph, nodes)
    again = tmp_path / f"again.{ending}"
    (theirs.to_json if ending == "json" else theirs.to_pt)(str(again))
    read, circuit = read_graph(again, graph)
    torch.testing.assert_close(read.scores, scores.scores)
    assert torch.equal(circuit, kept)


def shared_columns(graph: Graph) -> list[int]:
    """Our destinations, each as often as EAP-IG has it."""
    group = graph.n_heads // graph.n_kv_heads
    return [
        j for j, name in enumerate(graph.destination_names) for _ in range(group if name.endswith((".k", ".v")) else 1)
    ]


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
    wanted = {"embed -> L0H0.q": 0.5, "embed -> L0KV0.k": 4.0, "L0H3 -> M1": -2.0}  # k: the sum of two heads
    for name, score in wanted.items():
        assert scores.scores[graph.edge(name)] == score
        assert kept[graph.edge(name)]  # k: one of two heads is in the graph
    assert scores.scores.count_nonzero() == kept.sum() == 3


@pytest.mark.parametrize("ending", ["json", "pt"])
def test_a_file_with_k_and_v_for_every_head_gives_the_scores_of_the_shared_inputs(ending: str, tmp_path: Path) -> None:
    """EAP of the same model with its k and v repeated for every head, as EAP-IG runs a grouped-query model."""
    model, task = tiny("llama", num_hidden_layers=2), random_task()
    repeated = tiny("llama", num_hidden_layers=2, num_key_value_heads=model.n_heads)
    weights = model.hf.state_dict()
    for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
        by_head = weights[name].unflatten(0, (model.n_kv_heads, -1))
        weights[name] = by_head.repeat_interleave(model.n_heads // model.n_kv_heads, 0).flatten(0, 1)
    repeated.hf.load_state_dict(weights)
    theirs = attribute_edges(repeated, task)
    path = tmp_path / f"graph.{ending}"
    write_graph(path, theirs, theirs.graph.edges, 48)
    read, _ = read_graph(path, Graph.of(model.anatomy))
    torch.testing.assert_close(read.scores, attribute_edges(model, task).scores, atol=1e-6, rtol=1e-4)


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
        ("{", "is not a graph file of EAP-IG"),
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
        (by_hand(nodes={"m0": {"in_graph": True, "score": 1.0}}, edges={}), "scores of nodes and none of edges"),
    ],
)
def test_files_that_do_not_fit(data: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(GatelensError, match=message):
        read_graph(path, GRAPHS["shared keys"])


def matrices(**changes: Any) -> dict[str, Any]:
    """A graph as EAP-IG writes it with torch, of a model with shared keys."""
    shape = (11, 27)
    config = {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 48}
    return {
        "cfg": config,
        "edges_scores": torch.zeros(shape),
        "edges_in_graph": torch.zeros(shape, dtype=torch.bool),
        "nodes_in_graph": torch.zeros(shape[0], dtype=torch.bool),
        **changes,
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "is not a circuit"),
        (matrices(edges_scores=None), "a .pt graph has 'cfg', 'edges_scores' and 'edges_in_graph'"),
        (matrices(cfg={"n_layers": 3, "n_heads": 4}), "3 layers of 4 heads, but this model has 2 layers of 4 heads"),
        (matrices(edges_scores=torch.zeros(11, 19)), r"shape \(11, 19\), but this model needs \(11, 27\)"),
        (matrices(edges_scores=torch.full((11, 27), torch.nan)), "scores that are not finite"),
        (matrices(src_nodes=["logits"] * 11), "in another order"),
    ],
)
def test_matrices_that_do_not_fit(data: Any, message: str, tmp_path: Path) -> None:
    torch.save(data, tmp_path / "graph.pt")
    with pytest.raises(GatelensError, match=message):
        read_graph(tmp_path / "graph.pt", GRAPHS["shared keys"])


class RunsCode:
    """What a malicious file would hold: unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("plain", [True, False])
def test_a_file_that_would_run_code_is_refused(plain: bool, tmp_path: Path) -> None:
    path, trace = tmp_path / "graph.pt", tmp_path / "trace"
    data = matrices(cfg=RunsCode(f"touch {trace}"))
    if plain:
        path.write_bytes(pickle.dumps(data, protocol=2))
    else:
        torch.save(data, path)
    with pytest.raises(GatelensError, match="is not a graph file of EAP-IG that can be read safely"):
        read_graph(path, GRAPHS["shared keys"])
    assert not trace.exists()


def test_other_endings(tmp_path: Path) -> None:
    scores, kept = some(GRAPHS["plain"])
    with pytest.raises(GatelensError, match=r"ends in \.json or \.pt"):
        write_graph(tmp_path / "graph.txt", scores, kept, 48)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="no file"):
        read_graph(tmp_path / "graph.json", GRAPHS["plain"])


@pytest.mark.parametrize("ending", ["json", "pt"])
def test_a_model_of_another_width(ending: str, tmp_path: Path) -> None:
    graph, path = GRAPHS["plain"], tmp_path / f"graph.{ending}"
    write_graph(path, *some(graph), 48)
    read_graph(path, graph, 48)
    with pytest.raises(GatelensError, match="a model of width 48, but this model has width 64"):
        read_graph(path, graph, 64)

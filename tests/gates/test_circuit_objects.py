"""Circuits as objects, on a model whose circuit is known."""

from __future__ import annotations

import pytest
import torch
from families import tiny
from toys import PLANTED, planted, planted_task, random_task

import gatelens
from gatelens import Circuit, GatelensError
from gatelens.gates import EDGES
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context


def planted_scores(extra: tuple[str, ...] = ()) -> EdgeScores:
    graph = Graph.of(planted().anatomy)
    scores = torch.zeros(graph.n_sources, graph.n_destinations)
    for weight, name in enumerate(reversed([*PLANTED, *extra]), start=1):
        scores[graph.edge(name)] = float(weight)
    return EdgeScores(scores, graph, "by hand")


def test_nodes_and_edges_of_the_planted_circuit() -> None:
    circuit = planted_scores().circuit(len(PLANTED))
    assert circuit.nodes == ["embed", "L0H2", "L1H1", "logits"]
    assert circuit.edges == [tuple(name.split(" -> ")) for name in PLANTED]
    assert [gate.name for gate in circuit.gates] == PLANTED
    assert len(circuit) == len(PLANTED)
    assert "L1H1" in circuit
    assert "L0H2 -> L1H1.k" in circuit
    assert "L0H0" not in circuit


def test_edges_on_no_path_are_left_out() -> None:
    """L0H0 reads nothing in the circuit, so what leaves it has no effect."""
    circuit = planted_scores(("L0H0 -> M1", "M1 -> logits")).circuit(7)
    assert circuit.edges == [tuple(name.split(" -> ")) for name in PLANTED]


def test_networkx() -> None:
    graph = planted_scores().circuit(5).to_networkx()
    assert graph.nodes["L1H1"] == {"kind": "head", "layer": 1}
    assert graph.nodes["embed"]["kind"] == "embed"
    into = {(source, data["input"]) for source, _, data in graph.in_edges("L1H1", data=True)}
    assert into == {("L0H2", "k"), ("embed", "q"), ("embed", "v")}
    assert graph.number_of_edges() == 5


def test_explain_is_the_model_with_everything_and_nothing() -> None:
    """With no gate kept the circuit alone is the corrupt run; without it, everything. The planted circuit suffices."""
    model, task = planted(), planted_task()
    scores = planted_scores()
    with torch.no_grad():
        [bucket] = task.buckets
        clean, corrupt = (model.hf(x).logits[:, -1].softmax(-1) for x in (bucket.clean, bucket.corrupt))
    answers = task.answer_ids[:, 0]
    for number in (0, 3):
        nothing = scores.circuit(0).explain(model, task, number)
        everything, alone, without = nothing.parts
        assert everything.probability == pytest.approx(float(clean[number, answers[number]]), rel=1e-4)
        assert alone.probability == pytest.approx(float(corrupt[number, answers[number]]), rel=1e-4)
        assert without.probability == pytest.approx(everything.probability, rel=1e-4)
        assert everything.rank == 1
        assert alone.rank == int((corrupt[number] > corrupt[number, answers[number]]).sum()) + 1
        whole = scores.circuit(len(PLANTED)).explain(model, task, number)
        assert whole.parts[1].rank == 1
        assert whole.parts[1].probability > 0.5 * everything.probability
        assert whole.parts[2].rank > 1
        assert whole.parts[0].top[0] == whole.answers[0]


@pytest.mark.parametrize("level", ["heads", "attention"])
def test_explain_at_other_levels(level: str) -> None:
    model, task = tiny("llama"), random_task(n=3, lengths=(9, 7))
    scores = gatelens.attribute(gatelens.gates.LEVELS[level], model, task)
    total = max(int(gate_set.exists.sum()) for gate_set in scores.gate_sets())
    with torch.no_grad():
        for number in (0, 1, 2):
            bucket = next(bucket for bucket in task.buckets if number in bucket.which.tolist())
            at = bucket.which.tolist().index(number)
            clean = model.hf(bucket.clean[at, None]).logits[0, -1].softmax(-1)[task.answer_ids[number, 0]]
            parts = scores.circuit(total).explain(model, task, number).parts
            assert parts[0].probability == pytest.approx(float(clean), rel=1e-3)
            assert parts[1].probability == pytest.approx(float(clean), rel=1e-3)


def test_explain_a_text() -> None:
    model = tiny("llama")
    scores = HeadScores(torch.rand(3, 4), "any")
    shown = scores.circuit(4).explain(model, "t5 t6 t7", corrupt="t5 t8 t7", answer=" t9")
    with torch.no_grad():
        logits = model.hf(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert shown.parts[0].probability == pytest.approx(float(logits.softmax(-1)[9]), rel=1e-4)
    assert shown.parts[0].wrong is None
    with pytest.raises(GatelensError, match="have 3 and 2 tokens"):
        scores.circuit(4).explain(model, "t5 t6 t7", corrupt="t5 t8", answer=" t9")
    with pytest.raises(GatelensError, match="give corrupt= "):
        scores.circuit(4).explain(model, "t5 t6 t7")


def test_a_kept_circuit_is_the_same_run() -> None:
    """`model.keep(circuit)` on the clean prompt, with the corrupt run, is the level's own run."""
    model, task = planted(), planted_task()
    circuit = planted_scores().circuit(5)
    [bucket] = task.buckets
    closed = EDGES.capture(model, bucket.corrupt)
    right = EDGES.run(model, bucket.clean, circuit.mask[None], closed, context=Context())[0]
    with torch.no_grad(), model.keep(circuit, model.capture(bucket.corrupt)):
        torch.testing.assert_close(model.hf(bucket.clean).logits[:, -1], right, rtol=1e-4, atol=1e-4)


def test_bad_circuits() -> None:
    model, task = tiny("llama"), random_task(n=2)
    with pytest.raises(GatelensError, match="k is -1"):
        planted_scores().circuit(-1)
    attention: Circuit = gatelens.attribute_attention(model, task).circuit(5)
    with pytest.raises(GatelensError, match="belong to single prompts"), model.keep(attention):
        pass
    with pytest.raises(GatelensError, match="which tiny-llama does not have"), model.keep(planted_scores().circuit(5)):
        pass
    with pytest.raises(GatelensError, match="no prompt 7 in toy"):
        attention.explain(model, task, 7)

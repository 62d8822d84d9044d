"""Tests of circuits: of the planted circuit, whose gates are known, and against circuits that are evaluated plainly."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from pieces import finish_in_pieces
from torch import Tensor
from toys import PLANTED, plain_run, planted, planted_task, random_task

from gatelens import CircuitSettings, attribute, attribute_edges, explained_effect, find_circuit, load_circuit
from gatelens.gates import EDGES, LEVELS
from gatelens.gates.shared_level import ScoreTensors
from gatelens.measures import circuit_tests
from gatelens.measures.circuit_tests import check_circuit
from gatelens.measures.hypotheses import equivalence, independence
from gatelens.measures.top_k import Circuits
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask


@pytest.fixture(autouse=True)
def few_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_tests, "RANDOM_ADDITIONS", 30)


def plain_metric(model: Model, task: CircuitTask, edges: Iterable[str] | None = None) -> Tensor:
    """The metric (prompt,) of a plain transformer whose destinations read the corrupt run, except along these edges.

    Without edges given, everything is clean.
    """
    metrics, kept = torch.empty(len(task)), None if edges is None else set(edges)
    for bucket in task.buckets:
        corrupt, _ = plain_run(model, bucket.corrupt)

        def read(destination: str, sources: dict[str, Tensor], biases: Tensor, corrupt: Any = corrupt) -> Tensor:
            parts = (
                output if kept is None or f"{source} -> {destination}" in kept else corrupt[source]
                for source, output in sources.items()
            )
            return sum(parts) + biases

        with torch.no_grad():
            metrics[bucket.which] = task.metric(plain_run(model, bucket.clean, read)[1], bucket)
    return metrics


def plainly_lost(model: Model, task: CircuitTask, circuit: Collection[str]) -> dict[str, float]:
    """What the circuit loses without each of its edges, as a share of the effect of the whole model."""
    effect = (plain_metric(model, task) - plain_metric(model, task, ())).mean()
    kept = plain_metric(model, task, circuit)
    return {gate: float((kept - plain_metric(model, task, set(circuit) - {gate})).mean() / effect) for gate in circuit}


class TestPlanted:
    def test_every_edge_of_the_planted_circuit_is_needed(self) -> None:
        model, task = planted(), planted_task(n=8)
        scores = attribute_edges(model, task, steps=8)
        curve, circuits = explained_effect(model, task, scores), Circuits.of(model, task, scores)
        tests = check_circuit(circuits, scores, 5, curve.everything[0])
        assert sorted(gate.gate for gate in tests.dropped) == sorted(PLANTED)
        assert tests.gates == 5
        assert not tests.needless
        lost = {gate.gate: gate.lost for gate in tests.dropped}
        assert lost == pytest.approx(plainly_lost(model, task, PLANTED), abs=1e-4)
        assert all(gate.low <= gate.lost <= gate.high for gate in tests.dropped)
        # Without its only edge to the logits, the circuit loses all that it explains.
        assert lost["L1H1 -> logits"] == pytest.approx(float(curve.effect[curve.asked.index(5)]), abs=1e-4)

    def test_what_does_nothing_is_needless(self) -> None:
        """A circuit of the planted edges and of 10 random paths."""
        model, task = planted(), planted_task(n=8)
        graph, generator = Graph.of(model.anatomy), torch.Generator().manual_seed(1)
        values = torch.zeros(graph.edges.shape)
        for name in PLANTED:
            values[graph.edge(name)] = 2
        for _ in range(10):
            for edge in graph.random_path(generator):
                values[edge] = values[edge].clamp(min=1)
        scores = EDGES.make_scores(graph, "by hand", ScoreTensors(values))
        circuits, k = Circuits.of(model, task, scores), int((values > 0).sum())
        tests = check_circuit(circuits, scores, k, explained_effect(model, task, scores).everything[0])
        assert tests.gates == len(tests.dropped) == k
        circuit = {gate.gate for gate in tests.dropped}
        lost = {gate.gate: gate.lost for gate in tests.dropped}
        assert lost == pytest.approx(plainly_lost(model, task, circuit), abs=1e-4)
        assert min(lost[name] for name in PLANTED) > max(lost[name] for name in circuit - set(PLANTED))
        assert not {gate.gate for gate in tests.needless} & set(PLANTED)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_those_of_plain_circuits(level: str) -> None:
    model, task = tiny("llama"), random_task(n=4, lengths=(4, 3))
    scores = attribute(LEVELS[level], model, task)
    circuits = Circuits.of(model, task, scores)
    k = {"heads": 5, "edges": 60, "edges-by-role": 300, "attention": 6}[level]
    curve = explained_effect(model, task, scores)
    tests = check_circuit(circuits, scores, k, curve.everything[0])
    metrics = torch.empty(2, len(task))
    for i, bucket in enumerate(circuits.batches):
        metrics[:, bucket.which] = torch.cat([circuits.metric(i, [k]), circuits.metric(i, [k], complement=True)])
    assert tests.equivalence == equivalence(metrics[0], curve.everything[0])
    if level in ("heads", "attention"):  # edges on no path are not in the circuit, so that they belong to the rest
        assert tests.independence.p == pytest.approx(independence(metrics[1], curve.everything[0], task.seed).p)
        # The last gate dropped is the circuit of one gate less.
        less = torch.empty(len(task))
        for i, bucket in enumerate(circuits.batches):
            less[bucket.which] = circuits.metric(i, [k - 1])[0]
        possible = (curve.everything[0] - curve.none[0]).mean()
        assert tests.dropped[-1].lost == pytest.approx(float((metrics[0] - less).mean() / possible), abs=1e-4)
    assert len(tests.dropped) == min(64, tests.gates)


def test_a_random_path_leads_from_the_embedding_to_the_logits() -> None:
    graph = Graph(n_layers=4, n_heads=4, n_kv_heads=2)
    lengths = set()
    for seed in range(50):
        path = graph.random_path(torch.Generator().manual_seed(seed))
        kept = torch.zeros(1, *graph.edges.shape, dtype=torch.bool)
        for edge in path:
            kept[0][edge] = True
        assert torch.equal(graph.on_a_path(kept), kept)
        assert path[0][1] == graph.logits
        assert path[-1][0] == 0
        lengths.add(len(path))
    assert len(lengths) > 2


@pytest.mark.parametrize("level", LEVELS)
def test_are_saved_with_the_circuit(level: str, tmp_path: Path) -> None:
    few = {"method": "eap", "points": 4, "random_points": 2, "sample": 0, "describe": 0, "areas": "none"}
    settings = CircuitSettings(level=level, tests=True, threshold=0.5, allow_noise=True, **few)
    result = find_circuit(tiny("llama"), random_task(n=3, lengths=(4,)), settings, out=tmp_path / "out")
    assert result.tests is not None
    assert load_circuit(tmp_path / "out").tests == result.tests
    lines = (tmp_path / "out" / "minimality.csv").read_text().splitlines()
    assert len(lines) == 1 + len(result.tests.dropped)
    assert settings.replace(tests=False).identity() == {k: v for k, v in settings.identity().items() if k != "tests"}


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Stopped at each piece in turn, every piece is computed once, and the numbers are the same."""
    model, task = tiny("llama"), random_task(n=3, lengths=(4,))
    scores = attribute(LEVELS["heads"], model, task)
    circuits, everything = Circuits.of(model, task, scores), torch.ones(3)
    found, written = finish_in_pieces(
        lambda: check_circuit(circuits, scores, 4, everything, context=Context.in_folder(tmp_path)), starts=40
    )
    assert found == check_circuit(circuits, scores, 4, everything)
    assert len(written) == len(set(written)) == 2 + 2 * 4  # the circuit, its gates, and 30 additions in rows of 8

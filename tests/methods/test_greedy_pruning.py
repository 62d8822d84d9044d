"""Greedy pruning of heads, against a plain loop on a plain model in float64."""

from __future__ import annotations

import pytest
import torch
from families import tiny_float64
from test_acdc import plain_distance
from toys import planted, planted_task, random_task

from gatelens import Context
from gatelens.gates.head_runs import capture_circuit, run_heads
from gatelens.gates.runs import capture
from gatelens.gates.search import Objective
from gatelens.methods.greedy_pruning import GreedyPruningSettings, prune_heads
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask


def plain_order(model: Model, task: CircuitTask, objective: Objective, drop: int) -> list[str]:
    """The heads in the order in which they are closed. Every test runs the whole model."""
    left = [name for name in Graph.of(model.anatomy).source_names if "H" in name]
    closed: list[str] = []
    while left:
        without = {
            head: plain_distance(model, task, lambda source, _, out=(*closed, head): source in out, objective)
            for head in left
        }
        worst = sorted(left, key=lambda head: without[head])[:drop]
        closed.extend(worst)
        left = [head for head in left if head not in worst]
    return closed


@pytest.mark.parametrize(
    ("family", "objective", "drop"), [("gpt2", "kl", 1), ("llama", "metric", 1), ("gpt_neox", "kl", 3)]
)
def test_is_a_plain_loop(family: str, objective: Objective, drop: int) -> None:
    model, task = tiny_float64(family, num_hidden_layers=2), random_task(n=3, lengths=(4, 3))
    scores = prune_heads(model, task, GreedyPruningSettings(objective=objective, drop=drop))
    best_first = [name for _, name, _ in scores.top(8)]
    assert best_first[::-1] == plain_order(model, task, objective, drop)
    assert scores.scores.flatten().sort().values.tolist() == pytest.approx([i / 8 for i in range(1, 9)])
    small = prune_heads(model, task, GreedyPruningSettings(objective=objective, drop=drop), context=Context(1e-9))
    assert torch.equal(small.scores, scores.scores)


def test_planted_heads_are_closed_last() -> None:
    scores = prune_heads(planted(), planted_task())
    assert {name for _, name, _ in scores.top(2)} == {"L0H2", "L1H1"}


def test_a_run_that_starts_from_a_circuit_is_a_whole_run() -> None:
    model, task = tiny_float64("llama"), random_task(n=2, lengths=(5,))
    [bucket] = task.buckets
    corrupt = capture(model, bucket.corrupt).heads
    circuit = torch.ones(3, 4, dtype=torch.float64)
    circuit[0, 1] = circuit[1, 2] = 0
    rows = circuit.repeat(4, 1, 1)
    rows[0, 2, 3] = rows[1, 1, 0] = rows[2, 0, 0] = 0  # and the last row is the circuit itself
    rows[1, 1, 2] = 1
    whole = run_heads(model, bucket.clean, rows, corrupt)
    start = capture_circuit(model, bucket.clean, circuit, corrupt)
    shared = run_heads(model, bucket.clean, rows, corrupt, start=start, start_gates=circuit)
    torch.testing.assert_close(shared, whole)
    torch.testing.assert_close(start.logits, whole[3])
    assert not torch.allclose(whole[0], whole[3])

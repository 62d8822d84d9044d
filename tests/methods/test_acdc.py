"""ACDC, against an exhaustive greedy search on a plain model in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import tiny_float64
from torch import Tensor
from toys import PLANTED, plain_run, planted, planted_task, random_task

from gatelens import Context, score_gates
from gatelens.gates import EDGES, HEADS
from gatelens.gates.level import Level
from gatelens.gates.search import Objective
from gatelens.methods.acdc import AcdcSettings, acdc
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask

Closed = Callable[[str, str], bool]
"""Called as closed(source, destination): whether the edge reads the corrupt run."""


def plain_distance(model: Model, task: CircuitTask, closed: Closed, objective: Objective) -> float:
    """How far a plain model with these edges closed is from the whole model, mean over prompts."""
    total = 0.0
    for bucket in task.buckets:
        corrupt, (_, clean) = plain_run(model, bucket.corrupt)[0], plain_run(model, bucket.clean)

        def read(name: str, sources: dict[str, Tensor], biases: Tensor, corrupt: dict[str, Tensor] = corrupt) -> Tensor:
            return sum(corrupt[s] if closed(s, name) else x for s, x in sources.items()) + biases

        logits = plain_run(model, bucket.clean, read)[1]
        if objective == "metric":
            total += float((task.metric(logits, bucket) - task.metric(clean, bucket)).abs().sum())
        else:
            total += float(torch.nn.functional.kl_div(logits.log_softmax(-1), clean.softmax(-1), reduction="sum"))
    return total / len(task)


def plain_search(
    model: Model, task: CircuitTask, level: Level, settings: AcdcSettings
) -> tuple[dict[str, float], set[str]]:
    """ACDC without any shortcut: every gate is tested by a whole run.

    Returns:
        How much farther closing each gate moved the circuit, by the gate's name; and the names of those that stay open.
    """
    graph = Graph.of(model.anatomy)
    if level is EDGES:
        order = [
            f"{source} -> {destination}"
            for j, destination in reversed(list(enumerate(graph.destination_names)))
            for source in reversed(graph.source_names[: int(graph.reads[j])])
        ]
    else:
        order = [name for name in reversed(graph.source_names) if "H" in name]
    closed: set[str] = set()

    def distance(without: set[str]) -> float:
        def is_closed(source: str, destination: str) -> bool:
            return source in without or f"{source} -> {destination}" in without

        return plain_distance(model, task, is_closed, settings.objective)

    now, changes = 0.0, {}
    for name in order:
        after = distance(closed | {name})
        changes[name] = after - now
        if changes[name] < settings.tau:
            closed.add(name)
            now = after
    return changes, set(order) - closed


@pytest.mark.parametrize(
    ("family", "level", "objective", "tau"),
    [
        ("gpt2", EDGES, "kl", 0.02),
        ("gpt2", EDGES, "metric", 0.02),
        ("llama", EDGES, "kl", 0.02),  # shared key-value heads
        ("gpt_neox", EDGES, "kl", 0.02),  # a parallel block
        ("gpt2", HEADS, "kl", 0.05),
        ("llama", HEADS, "metric", 0.9),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_is_an_exhaustive_greedy_search(family: str, level: Level, objective: Objective, tau: float) -> None:
    model, task = tiny_float64(family, num_hidden_layers=2), random_task(n=3, lengths=(4, 3))
    settings = AcdcSettings(tau=tau, objective=objective)
    changes, circuit = plain_search(model, task, level, settings)
    scores = acdc(level, model, task, settings)
    assert 0.05 < len(circuit) / len(changes) < 0.9  # both kinds of decision are made
    assert {name for _, name, score in scores.top(len(changes)) if score >= tau} == circuit
    for _, name, score in scores.top(len(changes)):
        assert score == pytest.approx(max(0.0, changes[name]), abs=1e-5)
    for ranking in ("absolute", "signed", "per-prompt"):
        assert {name for _, name, _ in scores.top(len(circuit), ranking)} == circuit


def test_edges_without_an_effect_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a huge threshold all edges into the logits are closed, and nothing else has an effect."""
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=1, lengths=(3,))
    graph, run, rows = Graph.of(model.anatomy), EDGES.run, []

    def counted(*args: object, **options: object) -> Tensor:
        rows.append(len(args[2]))
        return run(*args, **options)

    monkeypatch.setattr(type(EDGES), "run", staticmethod(counted))
    scores = acdc(EDGES, model, task, AcdcSettings(tau=1e6))
    assert sum(rows) <= 64 < graph.n_edges  # one piece
    assert scores.scores[:, graph.logits].any()
    assert not scores.scores[:, : graph.attention_inputs(0).stop].any()


def test_planted_edges_are_found() -> None:
    model, task = planted(), planted_task()
    scores = acdc(EDGES, model, task, AcdcSettings(tau=0.05))
    assert {name for _, name, score in scores.top(20) if score >= 0.05} == set(PLANTED)
    heads = acdc(HEADS, model, task, AcdcSettings(tau=0.05))
    assert {name for _, name, score in heads.top(8) if score >= 0.05} == {"L0H2", "L1H1"}


def test_batches_do_not_change_the_search(tmp_path: Path) -> None:
    model, task = tiny_float64("llama", num_hidden_layers=2), random_task(n=3, lengths=(4, 3))
    whole = score_gates("edges", model, task, "acdc", tau=0.02).scores
    small = score_gates("edges", model, task, "acdc", tau=0.02, context=Context(1e-9)).scores
    assert torch.allclose(small, whole, atol=1e-6)


def test_an_edge_search_that_was_killed_resumes(tmp_path: Path) -> None:
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=2, lengths=(3,))

    class Killed(Exception):
        pass

    def kill(title: str, done: int, total: int) -> None:
        if done >= 64:  # the first piece is saved
            raise Killed

    whole = acdc(EDGES, model, task)
    with pytest.raises(Killed):
        acdc(EDGES, model, task, context=Context.in_folder(tmp_path, progress=kill))
    assert len(list(tmp_path.iterdir())) == 1
    resumed = acdc(EDGES, model, task, context=Context.in_folder(tmp_path))
    assert torch.equal(resumed.scores, whole.scores)

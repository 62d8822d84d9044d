"""Edge pruning and uniform gradient sampling, against plain loops of torch on a plain model in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny, tiny_float64
from torch import Tensor
from toys import PLANTED, off, plain_run, planted, planted_task, random_task

from gatelens import Context
from gatelens.gates import ATTENTION, EDGES, HEADS
from gatelens.gates.learning import _generator
from gatelens.methods.edge_pruning import EdgePruningSettings, prune_edges
from gatelens.methods.ugs import UgsSettings, draw_mixture, sample_uniform_gradients
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask

UPDATES = 10


def noise(graph: Graph, update: int) -> Tensor:
    """The uniform numbers of an update, one for each edge that exists."""
    numbers = torch.rand(1, *graph.edges.shape, generator=_generator((0, 1, update, 0)), dtype=torch.float64)
    return numbers[0][graph.edges].clamp(1e-6, 1 - 1e-6)


def plain_kl(model: Model, task: CircuitTask, drawn: Tensor) -> Tensor:
    """The mean KL divergence from the clean run of a plain model with these gates on its edges."""
    [bucket], graph = task.buckets, Graph.of(model.anatomy)
    gates = torch.ones(graph.edges.shape, dtype=torch.float64).masked_scatter(graph.edges, drawn)
    with torch.no_grad():
        corrupt, clean = plain_run(model, bucket.corrupt)[0], plain_run(model, bucket.clean)[1].log_softmax(-1)

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        column = gates[:, graph.destination_names.index(name)]
        return sum(g * x + (1 - g) * corrupt[s] for g, (s, x) in zip(column, sources.items(), strict=False)) + biases

    circuit = plain_run(model, bucket.clean, read)[1].log_softmax(-1)
    return (clean.exp() * (clean - circuit)).sum(-1).mean()


def test_edge_pruning_is_a_plain_loop() -> None:
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=2, lengths=(4,))
    graph = Graph.of(model.anatomy)
    parameters = torch.full((graph.n_edges,), 10.0, dtype=torch.float64, requires_grad=True)
    multipliers = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam(
        [{"params": [parameters], "lr": 0.5}, {"params": [multipliers], "lr": 0.3, "maximize": True}]
    )
    start = torch.sigmoid(torch.tensor(10 - 2 / 3 * math.log(0.1 / 1.1)))
    for update in range(UPDATES):
        u = noise(graph, update)
        concrete = torch.sigmoid((u.log() - (1 - u).log() + parameters) / (2 / 3))
        gates = (1.2 * concrete - 0.1).clamp(0, 1)
        opened = torch.sigmoid(parameters - 2 / 3 * math.log(0.1 / 1.1)).mean()
        target = start + min(1, update / UPDATES / 0.5) * (0.1 - start)
        sparsity, sparsity_target = 1 - opened, 1 - target
        excess = sparsity - sparsity_target
        loss = plain_kl(model, task, gates) + multipliers[0] * excess + multipliers[1] * excess**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    settings = EdgePruningSettings(updates=UPDATES, share=0.1, warm_start=0, rate=0.5, multiplier_rate=0.3)
    scores = prune_edges(EDGES, model, task, settings)
    assert float(parameters.detach().std()) > 0.01  # they have moved apart
    assert off(scores.scores[graph.edges], torch.nn.functional.softplus(parameters)) < 1e-5
    assert not scores.scores[~graph.edges].any()


def test_ugs_is_a_plain_loop() -> None:
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=2, lengths=(4,))
    graph = Graph.of(model.anatomy)
    parameters = torch.ones(graph.n_edges, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameters], lr=0.2, betas=(0.9, 0.995))
    for update in range(UPDATES):
        u, p = noise(graph, update), parameters.detach().sigmoid()
        low, high = p - p * (1 - p) / 2, p + p * (1 - p) / 2  # the gate is 1 below, 0 above, and falls between
        gates = ((high - u) / (high - low)).clamp(0, 1).requires_grad_()
        [at_gates] = torch.autograd.grad(plain_kl(model, task, gates), gates)
        gradient = at_gates * ((low < u) & (u < high)) + 0.01 * p * (1 - p)
        parameters.grad = gradient * min(1.0, 5 / (float(gradient.norm()) + 1e-6))
        optimizer.step()
    scores = sample_uniform_gradients(
        EDGES, model, task, UgsSettings(updates=UPDATES, warm_start=0, rate=0.2, price=0.01)
    )
    assert float(parameters.detach().std()) > 0.01
    assert off(scores.scores[graph.edges], torch.nn.functional.softplus(parameters)) < 1e-5


def test_uniform_gradients_are_those_of_the_expected_loss() -> None:
    """For a loss c . gate the expected loss is c . p, whose gradient is c p (1 - p)."""
    parameters = torch.tensor([-2.0, 0.0, 1.5], requires_grad=True)
    uniform = torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0))
    gates = draw_mixture(parameters, uniform)
    factors = torch.tensor([1.0, -2.0, 3.0])
    [gradient] = torch.autograd.grad((gates * factors).sum(1).mean(), parameters)
    p = parameters.detach().sigmoid()
    torch.testing.assert_close(gates.mean(0), p, rtol=0, atol=5e-3)
    torch.testing.assert_close(gradient, factors * p * (1 - p), rtol=0.02, atol=0)
    assert ((gates > 0) & (gates < 1)).float().mean(0).tolist() == pytest.approx((p * (1 - p)).tolist(), abs=5e-3)


def test_planted_edges_are_learned() -> None:
    model, task = planted(), planted_task()
    by_pruning = prune_edges(EDGES, model, task, EdgePruningSettings(updates=40, share=0.06, warm_start=2, rate=0.3))
    by_sampling = sample_uniform_gradients(EDGES, model, task, UgsSettings(updates=60, share=0.06, warm_start=8))
    for scores in (by_pruning, by_sampling):
        assert {name for _, name, _ in scores.top(5)} == set(PLANTED)


def test_heads_and_attention_edges_are_learned_by_the_same_code() -> None:
    model, task = planted(), planted_task(n=2)
    settings = EdgePruningSettings(updates=30, share=0.25, warm_start=1, rate=0.3)
    assert {name for _, name, _ in prune_edges(HEADS, model, task, settings).top(2)} == {"L0H2", "L1H1"}
    scores = prune_edges(ATTENTION, model, task, settings.replace(share=0.05))
    for number in range(len(task)):
        order = scores.orders()[number]
        names = {scores.gate(number, int(position))[1] for position in order[:6]}
        assert f"prompt {number}: L1H1, query 5 <- key 2" in names  # the token after the first one of its kind


@pytest.mark.parametrize("level", [EDGES, ATTENTION], ids=lambda level: level.name)
def test_a_fit_killed_in_the_middle_resumes_with_the_same_numbers(level: Any, tmp_path: Path) -> None:
    model, task = tiny("llama", num_hidden_layers=1), random_task(n=3, lengths=(3, 2))
    settings = EdgePruningSettings(updates=28, batch=2, warm_start=0)

    class Killed(Exception):
        pass

    def kill(title: str, done: int, total: int) -> None:
        if title.startswith("learn") and done == 27:
            raise Killed

    whole = prune_edges(level, model, task, settings)
    with pytest.raises(Killed):
        prune_edges(level, model, task, settings, context=Context.in_folder(tmp_path, progress=kill))
    seen: list[int] = []
    context = Context.in_folder(tmp_path, progress=lambda title, done, total: seen.append(done))
    resumed = prune_edges(level, model, task, settings, context=context)
    assert seen[1] == 25  # where the state was saved last
    for ours, theirs in zip(resumed.gate_sets(), whole.gate_sets(), strict=True):
        assert torch.equal(ours.scores, theirs.scores)


def test_parts_that_fit_into_memory_give_the_same() -> None:
    model, task = tiny_float64("llama", num_hidden_layers=1), random_task(n=3, lengths=(3,))
    settings = EdgePruningSettings(updates=5, warm_start=2, draws=2)
    whole = prune_edges(EDGES, model, task, settings).scores
    assert off(prune_edges(EDGES, model, task, settings, context=Context(1e-9)).scores, whole) < 1e-6

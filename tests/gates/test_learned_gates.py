"""Runs that pass gradients to their gates, against autograd on a plain model and finite differences, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import CONFIGS, VOCAB, prompts, sparse_model, tiny_float64
from torch import Tensor
from toys import PLAIN, off, plain_run

from gatelens.gates import ATTENTION, EDGES
from gatelens.gates.component_runs import capture_components
from gatelens.gates.edge_backward import run_learned_edges
from gatelens.gates.edge_runs import run_edges
from gatelens.gates.level import Level
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import UNLIMITED, Context
from gatelens.sparse.recording import straight_through

CLEAN, CORRUPT = prompts(rows=2, length=5), prompts(seed=1, rows=2, length=5)
STEP = 1e-2


def direction(rows: int) -> Tensor:
    """What the logits are multiplied by, to have one number to differentiate."""
    return torch.randn(rows, len(CLEAN), VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def random_gates(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.mark.parametrize("name", [*PLAIN, "sparse"])
def test_edges_by_autograd_on_a_plain_model(name: str) -> None:
    model, values = sparse_model("llama") if name == "sparse" else (tiny_float64(name), None)
    graph = Graph.of(model.anatomy)
    gates = random_gates(2, graph.n_sources, graph.n_destinations)
    with straight_through(model.hf):
        logits = run_learned_edges(model, CLEAN, gates, capture_components(model, CORRUPT))
        [actual] = torch.autograd.grad((logits * direction(2)).sum(), gates)
    with torch.no_grad():
        corrupt = plain_run(model, CORRUPT, gates=values)[0]

    def gated(row: Tensor) -> Tensor:
        def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
            column = row[:, graph.destination_names.index(name)].to(biases)
            mixed = [g * x + (1 - g) * corrupt[s] for g, (s, x) in zip(column, sources.items(), strict=False)]
            return sum(mixed) + biases

        return plain_run(model, CLEAN, read, gates=values)[1]

    expected_logits = torch.stack([gated(row) for row in gates])
    [expected] = torch.autograd.grad((expected_logits * direction(2)).sum(), gates)
    assert off(logits, expected_logits) < 1e-5
    assert off(actual, expected) < (1e-3 if name == "sparse" else 1e-5)
    assert not actual[:, ~graph.edges].any()


def slopes(level: Level[Any], model: Model, gates: Tensor, closed: Any, places: Tensor) -> Tensor:
    """Fourth-order differences at some places of one row of gates, because some norms round to float32."""
    steps = torch.tensor([2.0, 1, -1, -2], dtype=torch.float64) * STEP
    moved = gates.detach().flatten().repeat(len(places), 4, 1)
    for row, place in zip(moved, places.tolist(), strict=True):
        row[:, place] += steps
    rows = moved.flatten(0, 1).unflatten(1, gates.shape[1:])
    with torch.no_grad():
        logits = level.run(model, CLEAN, rows, closed, context=UNLIMITED)
    values = (logits * direction(1)).sum((1, 2)).unflatten(0, (-1, 4))
    return values @ torch.tensor([-1.0, 8, -8, 1], dtype=torch.float64) / (12 * STEP)


OTHERS = [(EDGES, name) for name in CONFIGS if name not in PLAIN]


@pytest.mark.parametrize(("level", "name"), [*OTHERS, *((ATTENTION, name) for name in ("gpt2", "llama", "gemma2"))])
def test_finite_differences(level: Level[Any], name: str) -> None:
    model = tiny_float64(name)
    shape = level.shape(model, CLEAN.shape[1])
    gates = random_gates(1, *(() if level.shared else (len(CLEAN),)), *shape)
    closed = level.reads(level.capture(model, CORRUPT))
    [gradient] = torch.autograd.grad(
        (level.run(model, CLEAN, gates, closed, context=UNLIMITED) * direction(1)).sum(), gates
    )
    places = gradient.abs().flatten().argsort(descending=True)[:40:8]
    expected = slopes(level, model, gates, closed, places)
    assert off(gradient.flatten()[places], expected) < 5e-3


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2"])
def test_open_gates_are_the_model_and_closed_ones_the_corrupt_run(name: str) -> None:
    model = tiny_float64(name)
    for level in (EDGES, ATTENTION):
        shape = level.shape(model, CLEAN.shape[1])
        ones = torch.ones(1, *(() if level.shared else (len(CLEAN),)), *shape, dtype=torch.float64).requires_grad_()
        clean, corrupt = level.capture(model, CLEAN), level.capture(model, CORRUPT)
        opened = level.run(model, CLEAN, ones, level.reads(corrupt), context=UNLIMITED)[0]
        torch.testing.assert_close(opened, clean.logits, rtol=1e-6, atol=1e-6)
        # Closed attention edges leave the clean embedding, so the corrupt prompt is run there.
        tokens = CLEAN if level is EDGES else CORRUPT
        closed = level.run(model, tokens, 0 * ones, level.reads(corrupt), context=UNLIMITED)[0]
        torch.testing.assert_close(closed, corrupt.logits, rtol=1e-6, atol=1e-6)


def test_rows_one_at_a_time_give_the_same() -> None:
    model = tiny_float64("llama")
    graph, reference = Graph.of(model.anatomy), capture_components(model, CORRUPT)
    gates = random_gates(3, graph.n_sources, graph.n_destinations)
    gradients = []
    for context in (UNLIMITED, Context(1e-9)):
        logits = run_learned_edges(model, CLEAN, gates, reference, context=context)
        assert torch.equal(logits, run_edges(model, CLEAN, gates.detach(), reference, context=context))
        gradients += torch.autograd.grad((logits * direction(3)).sum(), gates)
    assert off(*gradients) < 1e-9

"""Gates on edges, against plain Hugging Face and against a transformer written out head by head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import CONFIGS, prompts, tiny
from torch import Tensor
from toys import PLAIN, plain_run, random_task

from gatelens import GatelensError, Model
from gatelens.gates import EDGES
from gatelens.gates.component_runs import capture_components, with_sources
from gatelens.gates.edge_runs import run_edges
from gatelens.measures.top_k import Circuits
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
BOTH = prompts(), prompts(seed=1)  # clean and corrupt


def shape(model: Model) -> tuple[int, int]:
    graph = Graph.of(model.anatomy)
    return graph.n_sources, graph.n_destinations


def random_gates(model: Model, rows: int = 3, seed: int = 0) -> Tensor:
    return torch.rand(rows, *shape(model), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain(model: Model, tokens: Tensor) -> Tensor:
    return model.hf(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, 0]


@torch.no_grad()
def oracle(model: Model, tokens: Tensor, gates: Tensor, reference: dict[str, Tensor]) -> Tensor:
    """Logits under one row of gates (source, destination), every input mixed by a plain sum."""
    graph = Graph.of(model.anatomy)

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        column = gates[:, graph.destination_names.index(name)].tolist()
        parts = [g * x + (1 - g) * reference[s] for g, (s, x) in zip(column, sources.items(), strict=False)]
        return sum(parts) + biases

    return plain_run(model, tokens, read)[1]


class TestEnds:
    def test_all_open_is_plain_hugging_face_to_the_last_bit(self, family: Model) -> None:
        corrupt = capture_components(family, BOTH[1])
        found = run_edges(family, BOTH[0], torch.ones(2, *shape(family)), corrupt)
        for row in found:
            assert torch.equal(row, plain(family, BOTH[0]))

    def test_all_closed_is_the_corrupt_run(self, family: Model) -> None:
        corrupt = capture_components(family, BOTH[1])
        found = run_edges(family, BOTH[0], torch.zeros(1, *shape(family)), corrupt)[0]
        torch.testing.assert_close(found, plain(family, BOTH[1]), **CLOSE)

    def test_trained(self, trained: Model) -> None:
        corrupt = capture_components(trained, BOTH[1])
        found = run_edges(
            trained, BOTH[0], torch.stack([torch.ones(shape(trained)), torch.zeros(shape(trained))]), corrupt
        )
        torch.testing.assert_close(found, torch.stack([plain(trained, tokens) for tokens in BOTH]), **CLOSE)

    def test_what_is_no_edge_does_not_count(self, family: Model) -> None:
        corrupt = capture_components(family, BOTH[1])
        gates = Graph.of(family.anatomy).edges.float()[None]
        assert torch.equal(run_edges(family, BOTH[0], gates, corrupt)[0], plain(family, BOTH[0]))


@pytest.mark.parametrize("name", PLAIN)
class TestOracle:
    def test_the_oracle_is_the_model(self, name: str) -> None:
        model = tiny(name)
        with torch.no_grad():
            torch.testing.assert_close(plain_run(model, BOTH[0])[1], plain(model, BOTH[0]), **CLOSE)

    def test_what_the_sources_wrote(self, name: str) -> None:
        model = tiny(name)
        found = capture_components(model, BOTH[0])
        with torch.no_grad():
            wanted, logits = plain_run(model, BOTH[0])
        assert list(wanted) == Graph.of(model.anatomy).source_names
        # An MLP's bias is its own; only the output projection's belongs to no source.
        torch.testing.assert_close(found.sources, torch.stack(list(wanted.values())), **CLOSE)
        torch.testing.assert_close(found.logits, logits, **CLOSE)

    def test_random_gates(self, name: str) -> None:
        model = tiny(name)
        gates = torch.cat([random_gates(model, 2), (random_gates(model, 2, seed=1) > 0.5).float()])
        with torch.no_grad():
            reference = plain_run(model, BOTH[1])[0]
        found = run_edges(model, BOTH[0], gates, capture_components(model, BOTH[1]))
        for row, mine in zip(gates, found, strict=True):
            torch.testing.assert_close(mine, oracle(model, BOTH[0], row, reference), **CLOSE)

    @pytest.mark.parametrize("kind", ["zero", "mean"])
    def test_zero_and_mean_as_the_reference(self, name: str, kind: str) -> None:
        model = tiny(name)
        gates = random_gates(model, 2)
        corrupt = capture_components(model, BOTH[1])
        with torch.no_grad():
            runs = plain_run(model, BOTH[1])[0]
        wanted = {s: torch.zeros(()) if kind == "zero" else x.mean((0, 1)) for s, x in runs.items()}
        mean = corrupt.sources.mean((1, 2), keepdim=True)
        reference = with_sources(model, corrupt, torch.zeros_like(mean) if kind == "zero" else mean)
        found = run_edges(model, BOTH[0], gates, reference)
        for row, mine in zip(gates, found, strict=True):
            torch.testing.assert_close(mine, oracle(model, BOTH[0], row, wanted), **CLOSE)


def test_one_edge_is_one_edge() -> None:
    """Closing q of one head leaves its k and v, and the other heads, as they are."""
    model = tiny("llama")
    graph = Graph.of(model.anatomy)
    with torch.no_grad():
        reference = plain_run(model, BOTH[1])[0]
    edges = ["embed -> L1H3.q", "L0H1 -> L1KV0.k", "M0 -> L2KV1.v", "L1H2 -> M1", "M2 -> logits"]
    gates = torch.ones(len(edges), *shape(model))
    for row, name in zip(gates, edges, strict=True):
        row[graph.edge(name)] = 0
    corrupt, clean = capture_components(model, BOTH[1]), capture_components(model, BOTH[0])
    found = run_edges(model, BOTH[0], gates, corrupt, start=clean)
    for row, mine in zip(gates, found, strict=True):
        assert not torch.allclose(mine, clean.logits, atol=1e-3)
        torch.testing.assert_close(mine, oracle(model, BOTH[0], row, reference), **CLOSE)


class TestHowItIsRun:
    """Rows together or alone, in small memory or large, from the start or from the first closed edge."""

    def gates(self, model: Model) -> Tensor:
        """Rows that are touched nowhere, everywhere, and from each layer on."""
        graph = Graph.of(model.anatomy)
        gates = torch.ones(graph.n_layers + 3, *shape(model))
        gates[1] = random_gates(model, 1)[0]
        for layer in range(graph.n_layers):
            gates[2 + layer, :, graph.attention_inputs(layer).start :] = random_gates(model, 1, seed=layer)[
                0, :, graph.attention_inputs(layer).start :
            ]
        gates[-1, :, graph.logits] = 0.5
        return gates

    @pytest.mark.parametrize("way", ["alone", "little memory", "start", "alone from the start", "repeated prompts"])
    def test_gives_the_same(self, family: Model, way: str) -> None:
        gates = self.gates(family)
        clean, corrupt = (capture_components(family, tokens) for tokens in BOTH)
        wanted = run_edges(family, BOTH[0], gates, corrupt)
        ways: dict[str, Callable[[], Tensor]] = {
            "alone": lambda: torch.cat([run_edges(family, BOTH[0], row[None], corrupt) for row in gates]),
            "little memory": lambda: run_edges(family, BOTH[0], gates, corrupt, context=Context(1e-9)),
            "start": lambda: run_edges(family, BOTH[0], gates[2:], corrupt, start=clean),
            "alone from the start": lambda: torch.cat(
                [run_edges(family, BOTH[0], row[None], corrupt, start=clean) for row in gates]
            ),
            "repeated prompts": lambda: torch.cat(
                [
                    run_edges(family, tokens[None], gates, capture_components(family, other[None]))
                    for tokens, other in zip(*BOTH, strict=True)
                ],
                1,
            ),
        }
        found = ways[way]()
        torch.testing.assert_close(found, wanted[-len(found) :], **CLOSE)

    def test_layers_below_the_first_closed_edge_are_not_run(self) -> None:
        model = tiny("llama")
        clean, corrupt = (capture_components(model, tokens) for tokens in BOTH)
        ran: list[int] = []
        handles = [
            block.mlp.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
            for layer, block in enumerate(model.anatomy.blocks)
        ]
        gates = torch.ones(1, *shape(model))
        gates[0, 0, Graph.of(model.anatomy).mlp_input(1)] = 0
        run_edges(model, BOTH[0], gates, corrupt, start=clean)
        for handle in handles:
            handle.remove()
        assert ran == [1, 2]


@pytest.mark.parametrize("name", CONFIGS)
def test_pruning_does_not_change_a_circuit(name: str) -> None:
    """What lies on no path carries nothing: logits with and without it are the same."""
    model, task = tiny(name), random_task()
    graph = Graph.of(model.anatomy)
    order = graph.edges.flatten().nonzero()[:, 0]
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
    ours = Circuits(EDGES, model, task, [order])
    bucket = ours.batches[0]
    ks = [len(order) // 10, len(order) // 5, len(order) // 2]
    kept = torch.zeros(len(ks), graph.edges.numel(), dtype=torch.bool)
    for row, k in zip(kept, ks, strict=True):
        row[order[:k]] = True
    pruned = ours.gates(0, ks)
    assert pruned.sum() < kept.sum()
    corrupt = capture_components(model, bucket.corrupt)
    unpruned = run_edges(model, bucket.clean, kept.unflatten(1, graph.edges.shape), corrupt)
    torch.testing.assert_close(run_edges(model, bucket.clean, pruned, corrupt), unpruned, **CLOSE)
    torch.testing.assert_close(ours.metric(0, ks), task.metric(unpruned, bucket), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [(2, 3), (1, 2, 3), (0, 16, 28)])
def test_gates_of_another_shape(given: tuple[int, ...]) -> None:
    model = tiny("llama")
    with pytest.raises(GatelensError, match=r"edge gates of tiny-llama must have the shape \(row, 16, 28\)"):
        run_edges(model, BOTH[0], torch.ones(given), capture_components(model, BOTH[1]))


def test_no_hook_is_left_behind(family: Model) -> None:
    corrupt = capture_components(family, BOTH[1])
    with pytest.raises(RuntimeError):
        run_edges(family, BOTH[0][:2], random_gates(family, 1), corrupt)  # three prompts there, two here
    assert torch.equal(capture_components(family, BOTH[0]).logits, plain(family, BOTH[0]))


def test_all_closed_is_the_corrupt_run_to_the_last_bit(family: Model) -> None:
    graph = Graph.of(family.anatomy)
    clean, corrupt = prompts(0), prompts(1)
    closed = torch.zeros(1, graph.n_sources, graph.n_destinations)
    found = run_edges(family, clean, closed, capture_components(family, corrupt))[0]
    with torch.no_grad():
        wanted = family.hf(corrupt, use_cache=False, logits_to_keep=1).logits[:, 0]
    assert torch.equal(found, wanted)

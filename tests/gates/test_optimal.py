"""Optimal ablation of heads and edges, against a plain loop of torch on a plain model in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import tiny, tiny_float64
from torch import Tensor
from toys import PLAIN, Read, off, parts_of, plain_run, random_task

from gatelens import CircuitSettings, Context, GatelensError, explained_effect, find_circuit
from gatelens.errors import GatelensWarning
from gatelens.gates import EDGES, HEADS, optimal
from gatelens.gates.component_runs import capture_components
from gatelens.gates.edge_backward import run_learned_constants
from gatelens.gates.edge_runs import run_edges
from gatelens.gates.edges import Edges
from gatelens.gates.head_runs import run_heads
from gatelens.gates.heads import Heads
from gatelens.gates.runs import capture
from gatelens.measures.top_k import Circuits
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.files import read_tensors
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import hold_out


def fitted(model: Model, task: CircuitTask) -> Tensor:
    return torch.stack(HEADS.optimal(model, task.buckets, Context()))


def mean_outputs(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """All outputs of heads (layer, token, head, dim), and their means."""
    z = torch.stack([heads.flatten(0, 1) for heads in capture(model, tokens).heads])
    return z, z.mean(1)


def test_is_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal, "UPDATES", 6)
    monkeypatch.setattr(optimal, "_PIECE", 4)
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=2, lengths=(4,))
    [bucket], parts = task.buckets, parts_of(model)
    clean_z, start = mean_outputs(model, bucket.clean)[0], mean_outputs(model, bucket.corrupt)[1]
    scale = (clean_z - start[:, None]).square().mean((1, 3)).sqrt()[..., None]
    target = plain_run(model, bucket.clean)[1].log_softmax(-1)
    shifts = torch.zeros_like(start, requires_grad=True)
    optimizer = torch.optim.Adam([shifts])
    for update in range(6):
        gates, constants = optimal.random_circuit((2, 4), update), start + scale * shifts

        def read(name: str, sources: dict[str, Tensor], biases: Tensor, gates=gates, constants=constants) -> Tensor:
            total = biases
            for source, output in sources.items():
                if source[0] == "L" and not gates[int(source[1]), int(source[3])]:
                    layer, head = int(source[1]), int(source[3])
                    output = parts.out(parts.layers[layer], head, constants[layer, head]).expand_as(output)
                total = total + output
            return total

        ours = plain_run(model, bucket.clean, read)[1].log_softmax(-1)
        loss = (target.exp() * (target - ours)).sum(-1).mean()
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - update / 6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(shifts.detach().abs().max()) > 0.1
    assert off(fitted(model, task), start + scale * shifts) < 1e-5


def test_circuits_are_closer_than_with_means() -> None:
    model, task = tiny("llama"), random_task(n=4, lengths=(5,))
    [bucket] = task.buckets
    clean, mean = capture(model, bucket.clean), mean_outputs(model, bucket.corrupt)[1]
    gates = torch.stack([optimal.random_circuit((3, 4), seed) for seed in range(1000, 1030)])

    def divergence(constants: Tensor) -> float:
        ours = run_heads(model, bucket.clean, gates, list(constants)).log_softmax(-1)
        target = clean.logits.log_softmax(-1)
        return float((target.exp() * (target - ours)).sum(-1).mean())

    assert divergence(fitted(model, task)) < 0.8 * divergence(mean)


@pytest.mark.parametrize("level", [HEADS, EDGES], ids=["heads", "edges"])
def test_a_killed_fit_resumes_with_the_same_numbers(
    level: Heads | Edges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimal, "UPDATES", 5)
    monkeypatch.setattr(optimal, "_PIECE", 2)
    model, task = tiny("llama", num_hidden_layers=2), random_task(n=3, lengths=(4, 3))

    class Killed(Exception):
        pass

    def kill(title: str, done: int, total: int) -> None:
        if done == 2:
            raise Killed

    def fit(context: Context) -> dict[str, Tensor]:
        return level.constant_tensors(level.optimal(model, task.buckets, context))

    whole = fit(Context())
    with pytest.raises(Killed):
        fit(Context.in_folder(tmp_path, progress=kill))
    assert len(list(tmp_path.iterdir())) == 2
    resumed = fit(Context.in_folder(tmp_path))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("source_level", [HEADS, EDGES], ids=["heads", "edges"])
def test_two_processes_fit_the_constants_of_one(source_level: Heads | Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of an update do not depend on how many processes share the other work."""
    monkeypatch.setattr(optimal, "UPDATES", 4)
    model, task, two = tiny("llama", num_hidden_layers=2), random_task(n=6), Processes(torch.device("cpu"))
    two.count = 2
    fits = []
    for processes in (None, two):
        circuits = Circuits(source_level, model, task, [], "optimal", Context(processes=processes))
        assert len(circuits.batches) == (1 if processes is None else 2)
        fits.append(source_level.constant_tensors(circuits.constants()))
    assert all(torch.equal(fits[1][name], values) for name, values in fits[0].items())


def test_constants_are_fitted_once_and_saved_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal, "UPDATES", 4)
    pieces, updates = [], optimal._Fit._updates
    monkeypatch.setattr(optimal._Fit, "_updates", lambda *args: pieces.append(args[2]) or updates(*args))
    model, task = tiny("llama", num_hidden_layers=2), random_task(n=3, lengths=(4,))
    settings = CircuitSettings(
        level="heads", method="eap", source="optimal", points=3, random_points=2, sample=0, allow_noise=True
    )
    with pytest.warns(GatelensWarning):  # this random model does not have the behaviour
        result = find_circuit(model, task, settings, out=tmp_path / "run")
    assert pieces == [0]
    saved = read_tensors(tmp_path / "run" / "constants.safetensors")
    assert off(torch.stack([saved["seed-0.0"], saved["seed-0.1"]]), fitted(model, task)) < 1e-6
    assert result.curve.source == "optimal"
    assert result.curve.effect[-1] == pytest.approx(1)


def read_constants(graph: Graph, gates: Tensor, constants: Tensor) -> Read:
    """What destinations read if closed edges carry the constants of their sources."""

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        total, to = biases, graph.destination_names.index(name)
        for source, output in sources.items():
            number = graph.source_names.index(source)
            total = total + (output if gates[number, to] else constants[number].expand_as(output))
        return total

    return read


@pytest.mark.parametrize("family", PLAIN)
def test_gradients_of_constants_are_those_of_a_plain_model(family: str) -> None:
    torch.manual_seed(0)
    model, [bucket] = tiny_float64(family, num_hidden_layers=2), random_task(n=2, lengths=(4,)).buckets
    graph = Graph.of(model.anatomy)
    gates = (torch.rand(2, *graph.edges.shape) < 0.5).double()
    run = capture_components(model, bucket.corrupt)  # any prompts of the same shape
    constants = (run.sources.mean((1, 2)) + 0.1 * torch.randn(graph.n_sources, model.anatomy.width)).double()

    def differentiated(run_rows: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = constants.clone().requires_grad_()
        logits = run_rows(leaf)
        weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
        return logits.detach(), torch.autograd.grad((weights * logits).sum(), leaf)[0]

    ours = differentiated(lambda leaf: run_learned_constants(model, bucket.clean, gates, leaf, run))
    plain = differentiated(
        lambda leaf: torch.stack([plain_run(model, bucket.clean, read_constants(graph, row, leaf))[1] for row in gates])
    )
    assert off(ours[0], plain[0]) < 1e-6  # the rotary angles of Hugging Face are float32
    assert off(ours[1], plain[1]) < 1e-6


def test_constants_of_edges_are_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal, "UPDATES", 6)
    monkeypatch.setattr(optimal, "_PIECE", 4)
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=2, lengths=(4,))
    [bucket], graph = task.buckets, Graph.of(model.anatomy)
    (clean, logits), (corrupt, _) = (plain_run(model, tokens) for tokens in (bucket.clean, bucket.corrupt))
    outputs, start = torch.stack([*clean.values()]).detach(), torch.stack([*corrupt.values()]).detach().mean((1, 2))
    scale = (outputs - start[:, None, None]).square().mean((1, 2, 3)).sqrt()[:, None]
    target = logits.detach().log_softmax(-1)
    shifts = torch.zeros_like(start, requires_grad=True)
    optimizer = torch.optim.Adam([shifts])
    for update in range(6):
        gates = torch.zeros(graph.edges.shape)
        gates[graph.edges] = optimal.random_circuit([graph.n_edges], update)
        read = read_constants(graph, gates, start + scale * shifts)
        ours = plain_run(model, bucket.clean, read)[1].log_softmax(-1)
        loss = (target.exp() * (target - ours)).sum(-1).mean()
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - update / 6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(shifts.detach().abs().max()) > 0.1
    assert off(EDGES.optimal(model, task.buckets, Context())[:, 0, 0], start + scale * shifts) < 1e-5


@pytest.mark.slow
def test_edge_circuits_are_closer_than_with_means() -> None:
    model, task = tiny("llama"), random_task(n=4, lengths=(5,))
    [bucket], graph = task.buckets, Graph.of(model.anatomy)
    target = capture_components(model, bucket.clean).logits.log_softmax(-1)
    generator = torch.Generator().manual_seed(7)
    shares = torch.linspace(0, 0.9, 20)[:, None, None]
    gates = (torch.rand(20, *graph.edges.shape, generator=generator) < shares).float()

    def divergence(constants: Tensor) -> float:
        closed = EDGES.closed(model, bucket.corrupt, "optimal", lambda: constants)
        ours = run_edges(model, bucket.clean, gates, closed).log_softmax(-1)
        return float((target.exp() * (target - ours)).sum(-1).mean())

    mean = EDGES.mean(model, [bucket.corrupt])
    assert divergence(EDGES.optimal(model, task.buckets, Context())) < 0.8 * divergence(mean)


@pytest.mark.parametrize("level", ["heads", "edges"])
def test_constants_are_fitted_on_the_prompts_that_gates_are_ranked_on(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimal, "UPDATES", 4)
    model, task = tiny("llama", num_hidden_layers=2), random_task(n=6, lengths=(4,))
    settings = CircuitSettings(
        level=level, method="eap", source="optimal", held_out=True, points=3, random_points=0, sample=0,
        areas="none", refine=0, describe=0, allow_noise=True,
    )  # fmt: skip
    with pytest.warns(GatelensWarning):  # this random model does not have the behaviour
        result = find_circuit(model, task, settings, out=tmp_path / "run")
    ranked, evaluated = hold_out(task, 3)
    kind = EDGES if level == "edges" else HEADS
    saved = read_tensors(tmp_path / "run" / "constants.safetensors")
    expected = kind.constant_tensors(kind.optimal(model, ranked.buckets, Context()))
    assert saved.keys() == {f"seed-{evaluated.seed}.{name}" for name in expected}
    for name, constants in expected.items():
        assert torch.equal(saved[f"seed-{evaluated.seed}.{name}"], constants)
    curve = explained_effect(model, evaluated, result.scores[0], settings, fitted_on=ranked)
    assert torch.equal(curve.metrics, result.curve.metrics)
    assert not torch.equal(explained_effect(model, evaluated, result.scores[0], settings).metrics, curve.metrics)


def test_attention_edges_have_no_optimal_constants() -> None:
    with pytest.raises(GatelensError, match="no source 'optimal' for attention edges"):
        CircuitSettings(level="attention", source="optimal")

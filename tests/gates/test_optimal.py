"""Optimal ablation of heads, against a plain loop of torch on a plain model in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny, tiny_float64
from torch import Tensor
from toys import off, parts_of, plain_run, random_task

from gatelens import CircuitSettings, Context, GatelensError, find_circuit
from gatelens.errors import GatelensWarning
from gatelens.gates import HEADS, optimal
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture
from gatelens.model import Model
from gatelens.runtime.files import read_tensors
from gatelens.tasks.base import CircuitTask


def fitted(model: Model, task: CircuitTask, context: Context | None = None) -> Tensor:
    return torch.stack(HEADS.optimal(model, task.buckets, context or Context()))


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


def test_a_killed_fit_resumes_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal, "UPDATES", 5)
    monkeypatch.setattr(optimal, "_PIECE", 2)
    model, task = tiny("llama", num_hidden_layers=2), random_task(n=3, lengths=(4, 3))

    class Killed(Exception):
        pass

    def kill(title: str, done: int, total: int) -> None:
        if done == 2:
            raise Killed

    whole = fitted(model, task)
    with pytest.raises(Killed):
        fitted(model, task, Context.in_folder(tmp_path, progress=kill))
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(fitted(model, task, Context.in_folder(tmp_path)), whole)


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


def test_edges_have_no_optimal_constants() -> None:
    with pytest.raises(GatelensError, match="no source 'optimal' for edges"):
        CircuitSettings(level="edges", source="optimal")

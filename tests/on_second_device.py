"""On a device that is not the default one, everything runs and gives the numbers of the CPU: nothing mixes devices.

`test_devices.py` runs these tests in a process of their own, because the device stays registered until it ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from families import prompts, sparse_model, tiny
from second_device import NAME, on_second, second_device
from toys import random_task

from gatelens import CircuitSettings, RolesSettings, Scores, find_circuit, find_roles, score_gates
from gatelens.gates import LEVELS, edge_gradients
from gatelens.jobs.contrast import find_contrast
from gatelens.measures.contrast_result import TwoTaskSettings
from gatelens.methods.registry import methods
from gatelens.model import Model
from gatelens.sparse.sparsify import SparsifySettings, evaluate, sparsify
from gatelens.tasks.batches import as_responses, split

FEW: dict[str, dict[str, object]] = {  # settings that make a method fast
    "eap-ig": {"steps": 2},
    "eap-ig-activations": {"steps": 2},
    "edge-pruning": {"updates": 2, "warm_start": 1},
    "ugs": {"updates": 2, "warm_start": 1},
}
CASES = [(name, level) for name, method in methods().items() for level in LEVELS if method.works_on(level)]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # attention is computed by another kernel on the second device


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Model:
    """Small models of the two kinds of projections: one module for q, k and v, and one for each of them."""
    shared = {"num_key_value_heads": 1} if request.param == "llama" else {}
    return tiny(request.param, num_hidden_layers=2, num_attention_heads=2, **shared)


second_device()  # before the first backward pass, for which torch counts the devices


# --- The device itself ---


def test_tensors_of_two_devices_do_not_mix() -> None:
    x = torch.ones(2, 3, device=second_device())
    for mistake in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(2, 3).add_(x),
        lambda: torch.cat([x, torch.ones(1, 3)]),
        lambda: x @ torch.ones(3, 1),
        lambda: x.index_select(0, torch.tensor([0])),
        lambda: torch.where(torch.ones(2, 3).bool(), x, 0.0),
        lambda: torch.ones(2)[torch.tensor([0], device=x.device)],
    ):
        with pytest.raises(RuntimeError, match="tensors are on two devices"):
            mistake()
    with pytest.raises(RuntimeError, match=f"the generator is on cpu, the numbers are for {NAME}"):
        torch.randn(3, device=x.device, generator=torch.Generator())


def test_what_cuda_accepts_gives_the_numbers_of_the_cpu() -> None:
    x = torch.arange(6.0, device=second_device()).view(2, 3)
    assert (x * torch.tensor(2.0)).tolist() == [[0, 2, 4], [6, 8, 10]]  # a number has no device
    assert x[torch.tensor([1])].tolist() == [[3, 4, 5]]  # indices may come from the CPU
    assert x.cpu().device.type == "cpu"
    assert torch.zeros(2, 3).copy_(x).tolist() == x.tolist()
    weights = torch.ones(3, device=x.device, requires_grad=True)
    (x @ weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.device.type == NAME
    assert weights.grad.tolist() == [3, 5, 7]


def test_a_tensor_on_the_default_device_is_found(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that no test on the CPU notices: zeros that are not made on the device of the gradient."""
    task = random_task(n=1, lengths=(4,))
    monkeypatch.setattr(edge_gradients, "sum_rows", lambda gradient, rows: torch.zeros(gradient.shape))
    score_gates("edges", model, task, "eap")
    with pytest.raises(RuntimeError, match="tensors are on two devices"):
        score_gates("edges", on_second(model), task, "eap")


# --- What runs on it ---


def numbers(scores: Scores) -> torch.Tensor:
    return torch.cat([gate_set.scores[gate_set.exists].cpu() for gate_set in scores.gate_sets()])


@pytest.mark.parametrize(("method", "level"), CASES)
def test_methods(method: str, level: str) -> None:
    model = tiny("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    task = random_task(n=1, lengths=(4,))
    here, there = (score_gates(level, each, task, method, **FEW.get(method, {})) for each in (model, on_second(model)))
    torch.testing.assert_close(numbers(there), numbers(here), **CLOSE)


@pytest.mark.parametrize(
    ("level", "source"),
    [("heads", "mean"), ("edges", "corrupt"), ("edges-by-role", "corrupt"), ("attention", "corrupt")],
)
def test_circuits(level: str, source: str) -> None:
    """Scores, curve, check by patching, and descriptions of heads."""
    model, task = tiny("llama", num_hidden_layers=2), random_task(n=4, lengths=(4, 5))
    settings = CircuitSettings(
        level=level,
        source=source,
        method="eap",
        points=3,
        random_points=2,
        refine=0.0,
        sample=3,
        describe=1,
        allow_noise=True,
    )
    here, there = (find_circuit(each, task, settings).curve for each in (model, on_second(model)))
    assert there.asked == here.asked
    torch.testing.assert_close(there.none, here.none, **CLOSE)
    torch.testing.assert_close(there.metrics, here.metrics, **CLOSE)


def test_head_gating() -> None:
    model, examples = tiny("llama", num_hidden_layers=2), as_responses(random_task(n=6, lengths=(4, 5)))
    settings = RolesSettings(seeds=2, updates=2, batch=3, n=4, held_out=2, most=2, every=1)
    here, there = (find_roles(each, examples, settings) for each in (model, on_second(model)))
    torch.testing.assert_close(there.roles.plus, here.roles.plus, **CLOSE)
    for ours, theirs in zip(there.curves, here.curves, strict=True):
        torch.testing.assert_close(ours.changes, theirs.changes, **CLOSE)


def test_contrastive_head_gating() -> None:
    model, examples = tiny("llama", num_hidden_layers=2), as_responses(random_task(n=8, lengths=(4, 5)))
    settings = TwoTaskSettings(seeds=1, updates=2, batch=2, n=4)
    for each in (model, on_second(model)):
        find_contrast(each, *split(examples, 4), settings)


@pytest.mark.parametrize("parts", ["L1H0", "L0H1 -> L1H1.q", "M1"])
@pytest.mark.parametrize("source", ["zero", "mean"])
def test_interventions(parts: str, source: str, model: Model) -> None:
    tokens = prompts(rows=1)
    outputs = []
    for each in (model, on_second(model)):
        with each.ablate([parts], source, on=tokens):
            outputs.append(each.hf(tokens.to(each.device)).logits.cpu())
        with each.patch([parts], each.capture(prompts(seed=1, rows=1))):
            outputs.append(each.hf(tokens.to(each.device)).logits.cpu())
    for here, there in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(there, here, **CLOSE)


@pytest.mark.parametrize("level", LEVELS)
def test_sparse_models(level: str) -> None:
    model, _ = sparse_model("llama")
    task = random_task(n=2, lengths=(5,))
    here, there = (score_gates(level, each, task, "eap-ig", steps=2) for each in (model, on_second(model)))
    torch.testing.assert_close(numbers(there), numbers(here), **CLOSE)


SPARSIFY: list[dict[str, Any]] = [
    {"gate": "score", "weights": "full"},
    {"gate": "probability", "weights": "lora", "rank": 2, "gradient_checkpointing": True},
    {"gate": "probability", "weights": "lora", "rank": 2, "teacher_top": 4, "self_text": 2},
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=400)[0]))
    return path


@pytest.mark.parametrize("settings", SPARSIFY)
def test_sparsify(settings: dict[str, Any], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder, because transformers asks for the storage of the tensors that it writes, which these lack."""
    short = SparsifySettings(steps=2, batch=2, length=8, lengths=(), judge_sequences=2, **settings)
    judged = []
    for device in ("cpu", NAME):
        model = tiny("llama", num_hidden_layers=2)
        if device == NAME:
            model = on_second(model)
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", NAME)
        AcceleratorState._reset_state(reset_partial_state=True)
        sparse = sparsify(model, text, short)
        judged.append(evaluate(sparse, text, dense=model, length=8, n_sequences=2)[text.stem])
    AcceleratorState._reset_state(reset_partial_state=True)
    assert judged[1].sparse_loss == pytest.approx(judged[0].sparse_loss, rel=1e-3)

"""The prompts that a run keeps to be looked at: their attention is the model's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny
from toys import random_task

import gatelens
import gatelens.measures.example
from gatelens.gates.attention_runs import attention_patterns, capture_attention
from gatelens.measures.example import load_example, load_prompts, save_example
from gatelens.model import Model
from gatelens.sparse.in_model import make_sparse


@pytest.fixture(params=["dense", "sparse"])
def model(request: pytest.FixtureRequest) -> Model:
    made = tiny("llama")
    if request.param == "sparse":
        made = Model("sparse", made.hf, made.tokenizer, made.anatomy)
        make_sparse(made.hf, 0.5)
    return made


def test_patterns_are_the_softmax_before_gates(model: Model) -> None:
    tokens = random_task().buckets[0].clean
    weights, edges = attention_patterns(model, tokens)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    used = torch.stack(list(capture_attention(model, tokens).weights), 1)
    assert torch.allclose(weights * edges, used, atol=1e-6)
    visible = torch.ones(weights.shape[-2:]).tril().bool()
    if model.name == "sparse":
        assert 0 < edges.sum() < visible.sum() * edges[..., 0, 0].numel()
        assert (weights[~edges & visible] > 0).any()
    else:
        assert (edges == visible).all()
    assert not hasattr(model.anatomy.blocks[0].attention, "edge_gates")


def test_the_first_two_prompts_are_kept(model: Model, tmp_path: Path) -> None:
    task = random_task(3, lengths=(9, 5))
    save_example(model, task, tmp_path)
    first, second = load_example(tmp_path)
    for which, prompt in enumerate((first, second)):
        bucket = next(bucket for bucket in task.buckets if which in bucket.which)
        tokens = bucket.clean[bucket.which.tolist().index(which)]
        assert prompt.tokens == [f"t{token}" for token in tokens.tolist()]
        weights, edges = attention_patterns(model, tokens[None])
        assert torch.equal(prompt.attention, weights[0].half())
        logits = model.hf(tokens[None]).logits[0, -1]
        assert load_prompts(tmp_path)[which].probability == pytest.approx(
            float(logits.softmax(-1)[task.answer_ids[which, 0]])
        )
        assert (prompt.open is None) == (model.name != "sparse")
        if prompt.open is not None:
            assert torch.equal(prompt.open, edges[0])


@pytest.mark.parametrize("level", ["heads", "edges", "attention"])
def test_predictions_with_and_without_the_circuit(level: str, tmp_path: Path) -> None:
    """A circuit of all gates predicts what the model does. With all edges closed, the model is in its corrupt run."""
    model, task = tiny("llama"), random_task(3, lengths=(9, 5))
    scores = gatelens.attribute(gatelens.gates.LEVELS[level], model, task)
    total = max(int(gate_set.exists.sum()) for gate_set in scores.gate_sets())
    save_example(model, task, tmp_path, scores.circuit(total))
    for which, prompt in enumerate(load_prompts(tmp_path)):
        bucket = next(bucket for bucket in task.buckets if which in bucket.which)
        place = bucket.which.tolist().index(which)
        with torch.no_grad():
            clean, corrupt = (
                model.hf(tokens[place, None]).logits[0, -1].softmax(-1) for tokens in (bucket.clean, bucket.corrupt)
            )
        answer, wrong = int(task.answer_ids[which, 0]), int(task.wrong_ids[which, 0])
        everything, alone, without = prompt.parts
        assert [part.part for part in prompt.parts] == ["everything", "circuit alone", "without the circuit"]
        for part in (everything, alone):
            assert part.probability == pytest.approx(float(clean[answer]), rel=1e-3)
            assert part.wrong == pytest.approx(float(clean[wrong]), rel=1e-3)
            assert part.rank == int((clean > clean[answer]).sum()) + 1
        if level == "edges":
            assert without.probability == pytest.approx(float(corrupt[answer]), rel=1e-3)
        assert prompt.size == (None if level == "attention" else total)
        assert (prompt.answer, prompt.wrong) == ("right", "wrong")


def test_predictions_if_closed_gates_are_zero(tmp_path: Path) -> None:
    model, task = tiny("llama"), random_task(1)
    scores = gatelens.attribute_heads(model, task)
    circuit = scores.circuit(2)
    save_example(model, task, tmp_path, circuit, "zero")
    [prompt] = load_prompts(tmp_path)
    tokens, answer = task.buckets[0].clean[:1], int(task.answer_ids[0, 0])
    with torch.no_grad(), model.ablate(circuit, "zero"):
        without = model.hf(tokens).logits[0, -1].softmax(-1)
    with torch.no_grad(), model.keep(circuit, "zero"):
        alone = model.hf(tokens).logits[0, -1].softmax(-1)
    assert prompt.parts[1].probability == pytest.approx(float(alone[answer]), rel=1e-3)
    assert prompt.parts[2].probability == pytest.approx(float(without[answer]), rel=1e-3)


def test_long_prompts_are_left_out(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = random_task(2, lengths=(4, 9))
    small = model.n_layers * model.n_heads * 4**2 * 3
    monkeypatch.setattr(gatelens.measures.example, "_MAX_BYTES", small)
    save_example(model, task, tmp_path)
    assert [len(prompt.tokens) for prompt in load_example(tmp_path)] == [4]
    assert "left out" in json.loads((tmp_path / "example.json").read_text())["note"]


def test_a_folder_without_an_example_has_none(tmp_path: Path) -> None:
    assert load_example(tmp_path) == []


def test_a_token_without_a_text_of_its_own_is_shown_by_its_name() -> None:
    """A part of a character is decoded as the replacement character, and a token for control as nothing."""

    class Parts:
        def decode(self, tokens: list[int]) -> str:
            return {0: " word", 1: "\ufffd", 2: ""}[tokens[0]]

        def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
            return [f"name-{token}" for token in tokens]

    model = replace(tiny("llama"), tokenizer=Parts())
    texts = gatelens.measures.example.token_texts(model, torch.tensor([0, 1, 2]))
    assert texts == (" word", "name-1", "name-2")

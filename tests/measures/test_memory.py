"""The memory budget: what a job allocates is cut to it, and what cannot be cut is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, prompts, tiny
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gatelens
from gatelens import GatelensError
from gatelens.gates import ATTENTION, LEVELS
from gatelens.jobs.circuit import find_circuit
from gatelens.jobs.contrast import find_contrast
from gatelens.jobs.relations import find_relations
from gatelens.jobs.roles import find_roles
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.contrast_result import TwoTaskSettings
from gatelens.measures.relations_result import RelationsSettings
from gatelens.measures.roles_result import RolesSettings
from gatelens.measures.top_k import Circuits
from gatelens.methods.attribution import attribute
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks._metrics import Difference
from gatelens.tasks.build import from_tokens
from gatelens.tasks.preview import BATCH_SIZE, preview
from gatelens.tasks.tokens import Pair, PairTokens

N = 64


class Largest(TorchDispatchMode):
    """Records how many numbers the largest tensor has that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [tensor.untyped_storage().nbytes() // 4 for tensor in made if isinstance(tensor, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


class Held(TorchDispatchMode):
    """Counts the numbers of all tensors that were made here and are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)}
        result = function(*arguments, **(options or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // 4
        self.most = max(self.most, sum(numbers for _, numbers in self._alive.values()))
        return result


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        {
            "clean": f"t{i % 90 + 3} t4 t5",
            "corrupt": f"t{i % 90 + 3} t9 t5",
            "answer": " t7",
            "wrong": " t8",
            "roles": {"verb": "t4 t5"},
        }
        for i in range(N)
    ]
    path = tmp_path_factory.mktemp("task") / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_preview_holds_the_logits_of_one_batch(model: Model, own: Path) -> None:
    task = gatelens.task(own, model)
    with Largest() as largest:
        preview(model, task)
    weights = max(weight.numel() for weight in model.hf.parameters())
    assert largest.numbers <= max(weights, BATCH_SIZE * VOCAB)


def test_a_preview_of_responses_computes_their_logits_only(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": " ".join(["t3"] * 50), "response": " t4"}) + "\n")
    widths: list[int] = []
    hook = model.hf.lm_head.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    try:
        preview(model, gatelens.task(path, model))
    finally:
        hook.remove()
    assert widths == [1]


@pytest.mark.parametrize("name", LEVELS)
def test_circuits_hold_the_logits_of_as_many_rows_as_fit(name: str, model: Model, own: Path) -> None:
    task = gatelens.task(own, model)
    assert isinstance(task, gatelens.tasks.base.CircuitTask)
    scores = attribute(LEVELS[name], model, task)
    ks = [0, 1, 2, 3, 4, 5, 6, 7]
    wide = Circuits.of(model, task, scores)
    budget = 4e-9 * 6 * wide.level.closed_numbers(model, 3) + 4e-9 * 6 * (wide.level.row_numbers(model, 3) + 2 * VOCAB)
    narrow = Circuits.of(model, task, scores, context=Context(memory_gb=budget))
    assert len(narrow.batches) > 1
    with Largest() as largest:
        cut = torch.cat([narrow.metric(i, ks) for i in range(len(narrow.batches))], 1)
    weights = max(weight.numel() for weight in model.hf.parameters())
    assert largest.numbers <= max(weights, budget * 1e9 / 4)
    torch.testing.assert_close(cut, torch.cat([wide.metric(i, ks) for i in range(len(wide.batches))], 1))


@pytest.mark.parametrize("difference", ["logit", "probability"])
@pytest.mark.parametrize("name", LEVELS)
def test_a_batch_with_gradients_takes_what_is_estimated(name: str, difference: Difference) -> None:
    """With a vocabulary that is as large beside the layers as that of a real model: 12 prompts against 4."""
    model, length = tiny("llama", vocab_size=20_000), 8
    tokens = prompts(rows=24, length=length).tolist()
    pairs = [Pair("clean", "corrupt", ("right",), ("wrong",)) for _ in range(12)]
    ids = [PairTokens(tokens[i], tokens[i + 12], [5], [6, 7], ["verb"] * length) for i in range(12)]
    level = LEVELS[name].on(from_tokens("random", 0, pairs, ids))
    most: dict[int, int] = {}
    for n in (4, 12):
        task = from_tokens("random", 0, pairs[:n], ids[:n], difference)
        with Held() as held:
            attribute(LEVELS[name], model, task)
        most[n] = held.most
    one = (most[12] - most[4]) / 8
    assert 0.4 * level.attribute_numbers(model, length) < one < 1.2 * level.attribute_numbers(model, length)


def test_what_does_not_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    model = tiny("llama", max_position_embeddings=4096)
    path = tmp_path / "mine.jsonl"
    words = " ".join(["t3"] * 3999)
    path.write_text(json.dumps({"clean": f"{words} t4", "corrupt": f"{words} t5", "answer": " t7", "wrong": " t8"}))
    out = tmp_path / "out"
    settings = CircuitSettings(level="attention", method="eap", memory_gb=2.0)
    with pytest.raises(GatelensError, match=r"one prompt of 4,000 tokens at the level attention needs"):
        find_circuit(model, str(path), settings, out=out)
    assert not out.exists()


def test_the_scores_of_all_prompts_count(model: Model, tmp_path: Path) -> None:
    """Each prompt has its own attention edges, so their scores and rankings grow with the number of prompts."""
    path, out = tmp_path / "mine.jsonl", tmp_path / "out"
    words = " ".join(["t3"] * 63)
    line = json.dumps({"clean": f"{words} t4", "corrupt": f"{words} t5", "answer": " t7", "wrong": " t8"})
    path.write_text("\n".join([line] * 400))
    settings = CircuitSettings(level="attention", method="eap", n=400, memory_gb=0.1)
    says = "a job with 400 prompts, the longest of 64 tokens at the level attention, .* or fewer or shorter prompts"
    with pytest.raises(GatelensError, match=says):
        find_circuit(model, str(path), settings, out=out)
    assert not out.exists()


def test_attention_scores_and_rankings_hold_what_is_estimated() -> None:
    """Of 16 prompts against 4, in batches of one prompt, so that nothing else grows."""
    model, length = tiny("llama"), 16
    tokens = prompts(rows=32, length=length).tolist()
    pairs = [Pair("clean", "corrupt", ("right",), ("wrong",)) for _ in range(16)]
    ids = [PairTokens(tokens[i], tokens[i + 16], [5], [6, 7]) for i in range(16)]
    most: dict[int, int] = {}
    for n in (4, 16):
        task, context = from_tokens("random", 0, pairs[:n], ids[:n]), Context(1e-9)
        with Held() as held:
            scores = attribute(ATTENTION, model, task, context=context)
            circuits = Circuits.of(model, task, scores, context=context)
            shuffled = circuits.shuffled(0)
            scores.compact()
        assert len(circuits.orders) == len(shuffled.orders) == n
        most[n] = held.most
    one = (most[16] - most[4]) / 12
    assert 0.4 * ATTENTION.held_numbers(model, length) < one < 1.2 * ATTENTION.held_numbers(model, length)


class TestResponses:
    """One example cannot be cut. Its attention weights alone take 1.5 GB, before and after the softmax."""

    MODEL = tiny("llama", max_position_embeddings=4096)

    def task(self, folder: Path, name: str, response: str) -> str:
        line = {"prompt": " ".join(["t3"] * 3999), "response": response}
        (folder / name).write_text("\n".join([json.dumps(line)] * 4))
        return str(folder / name)

    def test_of_gate_and_contrast(self, tmp_path: Path) -> None:
        keep, lose = self.task(tmp_path, "keep.jsonl", " t4"), self.task(tmp_path, "lose.jsonl", " t5")
        out, says = tmp_path / "out", r"example 0 of \S*keep\.jsonl, which has 4,000 tokens, needs about 1\.\d GB"
        with pytest.raises(GatelensError, match=says):
            find_roles(self.MODEL, keep, RolesSettings(n=2, held_out=2, memory_gb=1.0), out=out)
        with pytest.raises(GatelensError, match=says):
            find_contrast(self.MODEL, keep, lose, TwoTaskSettings(n=4, memory_gb=1.0), out=out)
        assert not out.exists()

    def test_of_relations(self, tmp_path: Path) -> None:
        pairs = [{"input": " ".join([f"t{i}"] * 20), "output": f"t{i + 1}"} for i in range(3, 90)]
        for name in ("antonym", "present-past"):
            (tmp_path / f"{name}.json").write_text(json.dumps(pairs))
        settings = RelationsSettings(n=2, shots=60, memory_gb=0.1)
        with pytest.raises(GatelensError, match=r"which has 1,\d+ tokens, needs about 0\.\d GB"):
            find_relations(self.MODEL, settings, source=tmp_path, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()

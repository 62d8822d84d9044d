"""The penalty on open edges, against plain loops over layers, heads, queries and keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from families import prompts, tiny
from simple_settings import SIMPLE
from torch import Tensor

from gatelens.model import Model
from gatelens.sparse.in_model import make_sparse
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.recording import record_open, sequence_noise
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.sparse.sparsify._penalty import penalty
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training


def plain_penalty(expected_keys: Tensor, kind: str) -> Tensor:
    """The mean over sequences, from the expected keys of each query, (layer, sequence, head, query)."""
    layers, n_sequences, heads, queries = expected_keys.shape
    penalties = []
    for sequence in range(n_sequences):
        total, logarithms, of_queries = torch.zeros(()), [], []
        for layer in range(layers):
            for head in range(heads):
                keys = torch.zeros(())
                for query in range(queries):
                    keys = keys + expected_keys[layer, sequence, head, query]
                    of_queries.append(torch.log(expected_keys[layer, sequence, head, query] + 0.05))
                logarithms.append(torch.log(keys / queries + 0.05))
                total = total + keys
        visible = layers * heads * queries * (queries + 1) / 2
        share = total / visible
        kinds = {
            "share": share,
            "total": torch.log(share),
            "per-head": sum(logarithms) / len(logarithms),
            "per-query": sum(of_queries) / len(of_queries),
        }
        penalties.append(kinds[kind])
    return sum(penalties) / n_sequences  # type: ignore[return-value]


@pytest.mark.parametrize("gate", ["score", "probability"])
@pytest.mark.parametrize("kind", ["share", "total", "per-head", "per-query"])
def test_equals_plain_loops(kind: Any, gate: Any) -> None:
    hf = tiny("llama").hf
    make_sparse(hf, torch.linspace(-1, 2, 12).view(3, 4), gate=gate)
    with record_open(hf) as record:
        hf(input_ids=prompts())
    penalties = penalty(record, kind)
    assert penalties.shape == (len(prompts()),)
    torch.testing.assert_close(penalties.mean(), plain_penalty(record.expected_keys, kind), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "total_share"), [("total", 0.0), ("per-head", 0.7), ("per-query", 0.2)])
def test_a_step_minimises_it(llama: Model, kind: Any, total_share: float) -> None:
    """With almost no weight on the loss, the gradients of the biases are those of the penalty."""
    small: dict[str, Any] = {**SIMPLE, "batch": 2, "length": 8, "multiplier": 1e-7, "multiplier_low": 1e-7}
    settings = SparsifySettings(**{**small, "bias": 0.5, "penalty": kind, "total_share": total_share})
    words = prompts(rows=4, length=8).flatten()
    numbered = TrainingSequences([TrainingText("words", words, None, 1.0, 1.0)], 0)
    student = Student(llama, settings, share=True)
    Training(student, llama.hf, numbered, settings, Accelerator(cpu=True))._backward(0, range(2))
    gradients = [bias.grad * settings.multiplier for bias in student.biases()]  # type: ignore[operator]
    numbers = [(0, 0), (1, 0)]
    with sequence_noise(student.hf, [(0, 0, *n) for n in numbers]), record_open(student.hf) as record:
        student.hf(input_ids=numbered.batch(numbers, 8).tokens)
        total, of_kind = (plain_penalty(record.expected_keys, name) for name in ("total", kind))
        right = torch.autograd.grad(total_share * total + (1 - total_share) * of_kind, student.biases())
    for gradient, expected in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_mixture_is_between_the_two() -> None:
    hf = tiny("llama").hf
    make_sparse(hf, torch.linspace(-1, 2, 12).view(3, 4))
    with record_open(hf) as record:
        hf(input_ids=prompts())
    expected = 0.3 * plain_penalty(record.expected_keys, "per-head") + 0.7 * plain_penalty(
        record.expected_keys, "total"
    )
    torch.testing.assert_close(penalty(record, "per-head", 0.7).mean(), expected, rtol=1e-5, atol=1e-5)


def test_an_idle_head_costs_a_constant() -> None:
    """All gates closed: log(0.05) per head, with a gradient that is finite."""
    hf = tiny("llama").hf
    make_sparse(hf, -100.0, learned=True)
    with record_open(hf) as record:
        hf(input_ids=prompts())
    penalties = penalty(record, "per-head")
    penalties.mean().backward()
    assert penalties.tolist() == pytest.approx([math.log(0.05)] * len(prompts()))
    assert all(p.grad.isfinite().all() for name, p in hf.named_parameters() if name.endswith("gate_bias"))

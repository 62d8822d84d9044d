"""The small trained model of the tests has its behaviours, and two layers of heads that make induction."""

from __future__ import annotations

import copy

import pytest
import torch

from gatelens import Model, task
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.preview import preview


@pytest.mark.parametrize("name", ["induction", "ioi", "gender-pronoun"])
def test_answers_correctly(name: str, trained: Model) -> None:
    """The files are small and the prompts are not those that it has learned from."""
    assert preview(trained, task(name, trained, n=32)).figures["answered correctly"] > 0.9


def test_a_head_attends_to_the_answer_and_another_to_the_token_before(trained: Model) -> None:
    """Induction heads attend from the last token to the answer in the block; heads below, to the previous token."""
    induction = task("induction", trained, n=16)
    assert isinstance(induction, CircuitTask)
    hits, previous = torch.zeros(2, trained.n_layers, trained.n_heads)
    eager = copy.deepcopy(trained.hf)  # transformers leaves hooks in a model that has returned its attention
    eager.set_attn_implementation("eager")
    for bucket in induction.buckets:
        weights = torch.stack(eager(bucket.clean, output_attentions=True).attentions)
        last = weights[..., -1, :]  # layer, prompt, head, key
        answers = induction.answer_ids[bucket.which, :1]
        is_answer = (bucket.clean == answers).float()
        hits += torch.einsum("lphk,pk->lh", last, is_answer)
        previous += weights.diagonal(-1, 3, 4).mean(-1).sum(1)
    assert (hits / 16).max() > 0.5
    assert (previous / 16).max() > 0.5
    assert (previous / 16).amax(1).argmax() < (hits / 16).amax(1).argmax()

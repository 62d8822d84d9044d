"""Contrastive gates: both losses against plain implementations, and what the gates do to known heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from families import VOCAB, tiny
from response_examples import any_task, plain_log_prob
from torch import Tensor

from gatelens import GatelensError
from gatelens.gates.fit_plan import draw_batch
from gatelens.methods.contrast import ContrastSettings, fit_contrast_gates
from gatelens.runtime.context import Context


@pytest.mark.parametrize("objective", ["difference", "hinge"])
def test_gates_equal_those_of_a_plain_implementation(objective: str) -> None:
    model = tiny("llama")
    model.hf.double()
    keep, lose = any_task(6), any_task(6, seed=1)
    margin = 0.1  # some differences are beyond it, and others are not
    settings = ContrastSettings(seeds=1, updates=8, batch=3, objective=objective, margin=margin)  # type: ignore[arg-type]
    gates, losses = fit_contrast_gates(model, keep, lose, settings, context=Context())
    logits = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(0)).logit()
    logits.requires_grad_()
    adam = torch.optim.Adam([logits])
    differences: list[float] = []

    def nll(task: object, which: int) -> Tensor:
        return -plain_log_prob(model, task.examples[which], logits.sigmoid()).mean()  # type: ignore[attr-defined]

    for update in range(8):
        adam.param_groups[0]["lr"] = 0.1 + (0.01 - 0.1) * update / 7
        adam.zero_grad()
        total, shown = torch.zeros(()), 0.0
        for which in draw_batch(keep, 3, update, 0).which.tolist():
            kept, lost = nll(keep, which), nll(lose, which)
            differences.append(float(kept - lost))
            if objective == "hinge":
                loss = kept + max(math.log(VOCAB) - lost, torch.zeros(()))
                shown += float(loss)
            else:
                loss = kept if kept - lost < -margin else kept - lost
                shown += max(float(kept - lost), -margin)
            total = total + loss / 3
        if objective == "difference":
            total = total - 0.1 * logits.clamp(-4, 4).mean()
        assert float(losses[update, 0]) == pytest.approx(shown / 3, abs=1e-5)
        total.backward()
        adam.step()
    assert min(differences) < -margin < max(differences)
    torch.testing.assert_close(gates[0], logits.detach().sigmoid(), atol=1e-5, rtol=0)


def test_both_tasks_need_the_same_number_of_examples() -> None:
    with pytest.raises(GatelensError, match="6 examples to keep and any has 4 to lose: give both the same number"):
        fit_contrast_gates(tiny("llama"), any_task(6), any_task(4), ContrastSettings(), context=Context())


def test_parts_of_a_batch_keep_its_pairs_together() -> None:
    model, keep = tiny("llama"), any_task(6)
    lose = replace(any_task(6, seed=1), examples=any_task(6, seed=1).examples[::-1])
    settings = ContrastSettings(seeds=2, updates=3, batch=6, margin=0.1)
    whole = fit_contrast_gates(model, keep, lose, settings, context=Context())
    single = fit_contrast_gates(model, keep, lose, settings, context=Context(memory_gb=1e-9))
    for a, b in zip(whole, single, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)

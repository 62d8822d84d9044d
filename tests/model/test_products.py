"""Matrix products by oneDNN: the numbers and gradients of the model's own modules, and a model that stays untouched."""

from __future__ import annotations

import pytest
import torch
from families import tiny
from torch import Tensor, nn

from gatelens import Model
from gatelens.model import products
from gatelens.model.products import fast_products

pytestmark = pytest.mark.skipif(products._product() is None, reason="this torch has no oneDNN products")


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor on which oneDNN is faster."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


def logits_and_gradient(model: Model) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(2, 7, model.anatomy.width, generator=generator).requires_grad_()
    logits = model.hf(inputs_embeds=embedding).logits
    (gradient,) = torch.autograd.grad(logits.square().sum(), embedding)
    return logits.detach(), gradient


def test_products_have_the_numbers_and_gradients_of_the_model(family: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_and_gradient(family)
    calls: list[Tensor] = []
    multiply = products._multiply
    monkeypatch.setattr(products, "_multiply", lambda x, *rest: calls.append(x) or multiply(x, *rest))
    with fast_products(family.hf):
        fast = logits_and_gradient(family)
    n_linear = sum(isinstance(module, nn.Linear | products.Conv1D) for module in family.hf.modules())
    assert len(calls) == 2 * n_linear  # forward and backward of every linear module
    for mine, plain in zip(fast, expected, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5 * float(plain.abs().max()), rtol=0)


def test_the_model_is_as_before_also_after_an_exception() -> None:
    model = tiny("gpt2")
    with pytest.raises(ZeroDivisionError), fast_products(model.hf):
        1 / any("forward" in module.__dict__ for module in model.hf.modules()) / 0
    assert not any("forward" in module.__dict__ for module in model.hf.modules())


def test_what_is_trained_changed_or_in_another_precision_runs_as_it_is() -> None:
    frozen, trained, wrapped = (nn.Linear(3, 2) for _ in range(3))
    for module in (frozen, wrapped):
        module.requires_grad_(False)
    own = wrapped.forward = lambda x: x  # as accelerate does
    both = nn.Sequential(frozen, trained, wrapped)
    x = torch.ones(1, 3)
    with fast_products(both):
        assert "forward" in frozen.__dict__
        assert "forward" not in trained.__dict__
        assert wrapped.forward is own
        with torch.autocast("cpu", torch.bfloat16):
            assert frozen(x).dtype == torch.bfloat16
        assert frozen(x).dtype == torch.float32
    assert wrapped.forward is own

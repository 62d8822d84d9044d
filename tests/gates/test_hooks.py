"""Hooks edit what passes through a module, and are gone afterwards."""

from __future__ import annotations

import pytest
import torch
from families import prompts, tiny
from torch import Tensor, nn

from gatelens.gates.head_runs import run_heads
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import capture


def traces(module: nn.Module) -> list[tuple[object, ...]]:
    """All hooks and replaced forwards of a module and its parts."""
    return [
        (name, tuple(part._forward_hooks), tuple(part._forward_pre_hooks), part.__dict__.get("forward"))
        for name, part in module.named_modules()
    ]


class Two(nn.Module):
    """Takes its input by position or by name, and returns two tensors."""

    def forward(self, hidden_states: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        return hidden_states * factor, hidden_states


def test_before_edits_the_input_given_by_position_or_by_name() -> None:
    module, x = Two(), torch.ones(2)
    with Hooks() as hooks:
        hooks.before(module, lambda hidden: hidden + 1)
        assert module(x, 3.0)[0].tolist() == [6, 6]
        assert module(hidden_states=x, factor=3.0)[0].tolist() == [6, 6]
    assert module(x, 3.0)[0].tolist() == [3, 3]


def test_after_edits_the_first_output_and_keeps_the_others() -> None:
    module, x = Two(), torch.ones(2)
    with Hooks() as hooks:
        hooks.after(module, lambda out: out * 10)
        first, second = module(x)
    assert first.tolist() == [10, 10]
    assert second.tolist() == [1, 1]


def test_after_edits_a_single_output() -> None:
    module = nn.Identity()
    with Hooks() as hooks:
        hooks.after(module, lambda out: out * 10)
        assert module(torch.ones(1)).item() == 10


def test_an_edit_that_returns_none_changes_nothing() -> None:
    seen: list[Tensor] = []
    module = Two()
    with Hooks() as hooks:
        hooks.before(module, seen.append)
        hooks.after(module, seen.append)
        assert module(torch.ones(2), 2.0)[0].tolist() == [2, 2]
    assert [x.tolist() for x in seen] == [[1, 1], [2, 2]]


def test_instead_runs_another_forward_and_then_the_own_one_again() -> None:
    module = Two()
    with Hooks() as hooks:
        hooks.instead(module, lambda hidden: hidden * 7)
        assert module(torch.ones(1)).item() == 7
    assert "forward" not in module.__dict__
    assert module(torch.ones(1))[0].item() == 1


def test_instead_restores_a_forward_that_the_instance_carried() -> None:
    module = Two()
    module.forward = own = lambda hidden: hidden * 5  # type: ignore[method-assign]
    with Hooks() as hooks:
        hooks.instead(module, lambda hidden: hidden * 7)
        hooks.instead(module, lambda hidden: hidden * 8)
        assert module(torch.ones(1)).item() == 8
    assert module.forward is own


def test_everything_is_removed_when_the_block_fails() -> None:
    module = nn.Sequential(nn.Identity(), Two())
    before = traces(module)

    def fail() -> None:
        with Hooks() as hooks:
            hooks.before(module[0], lambda x: x)
            hooks.after(module[1], lambda x: x)
            hooks.instead(module[1], lambda x: x)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert traces(module) == before


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gated_run_leaves_nothing_behind(name: str) -> None:
    model, tokens = tiny(name), prompts()
    plain = model.hf(tokens).logits
    before = traces(model.hf)
    clean = capture(model, tokens)
    gates = torch.ones(2, model.n_layers, model.n_heads)
    gates[:, 1] = 0.5
    run_heads(model, tokens, gates, clean.heads, start=clean, logits_at="all")
    assert traces(model.hf) == before
    assert torch.equal(model.hf(tokens).logits, plain)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gated_run_that_fails_leaves_nothing_behind(name: str) -> None:
    model, tokens = tiny(name), prompts()
    plain = model.hf(tokens).logits
    before = traces(model.hf)
    clean = capture(model, tokens)
    gates = torch.ones(2, model.n_layers, model.n_heads)
    gates[:, 2] = 0.5
    of_another_shape = [torch.zeros(7, 7, 7, 7)] * model.n_layers
    with pytest.raises(RuntimeError, match="size"):
        run_heads(model, tokens, gates, of_another_shape, start=clean)
    with pytest.raises(IndexError):
        run_heads(model, tokens + 1000, gates)
    with pytest.raises(IndexError):
        capture(model, tokens + 1000)
    assert traces(model.hf) == before
    assert torch.equal(model.hf(tokens).logits, plain)

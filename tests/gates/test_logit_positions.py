"""Which positions' logits a run computes, and in which layout a linear module gets them."""

from __future__ import annotations

import pytest
import torch

from gatelens.gates.runs import pick


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_prompts", [1, 3])
def test_the_last_position_is_picked(dtype: torch.dtype, n_prompts: int) -> None:
    hidden = torch.randn(n_prompts, 5, 8).to(dtype)
    picked = pick(hidden, None, "last", n_prompts)
    assert picked.shape == (n_prompts, 1, 8)
    assert torch.equal(picked[:, 0], hidden[:, 4])


@pytest.mark.parametrize("n_prompts", [1, 3])
def test_half_precision_is_picked_without_gaps(n_prompts: int) -> None:
    """With gaps between rows, a linear module in bfloat16 is much slower on a CPU."""
    picked = pick(torch.randn(n_prompts, 5, 8).bfloat16(), None, "last", n_prompts)
    assert picked.stride() == (8, 8, 1)

"""Several passes in one: rows of a pass give the mean of single passes, and groups of sources add up to all."""

from __future__ import annotations

import pytest
import torch
from families import prompts, tiny_float64

from gatelens.gates.attention import ATTENTION
from gatelens.gates.edges import EDGES
from gatelens.gates.gradients import Pass
from gatelens.gates.heads import HEADS
from gatelens.gates.level import Level
from gatelens.gates.passes import embedding_path
from gatelens.tasks.base import Bucket

BATCH = Bucket(prompts(seed=0), prompts(seed=1), torch.arange(3))


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, 7] - logits[:, 8]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("level", [HEADS, EDGES, ATTENTION], ids=lambda level: level.name)
def test_the_products_of_rows_are_the_mean_of_those_of_single_passes(level: Level, family: str) -> None:
    model = tiny_float64(family)
    attribution = level.attribution(model, BATCH, metric)
    single = embedding_path(model, BATCH, [0.2, 0.7])
    streams = [step.stream for step in single]
    together = attribution.products(Pass(stream=torch.cat(streams), rows=2))  # type: ignore[arg-type]
    first, second = (attribution.products(step) for step in single)
    assert not torch.allclose(first, second, rtol=1e-3)
    torch.testing.assert_close(together, (first + second) / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("level", [HEADS, EDGES], ids=lambda level: level.name)
def test_the_products_of_groups_of_sources_add_up(level: Level, family: str) -> None:
    attribution = level.attribution(tiny_float64(family), BATCH, metric)
    parts = [attribution.products(Pass(only=group)) for group in attribution.groups()]
    assert all(part.any() for part in parts)
    torch.testing.assert_close(torch.stack(parts).sum(0), attribution.products(Pass()), rtol=1e-5, atol=1e-7)

"""Calibrated gates, against plain loops over the attention of the dense model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LENGTH, prompts, tiny
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.calibration import WIDTH, calibrate
from gatelens.sparse.in_model import is_sparse, make_sparse
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify.judge import judge

SHARE = 0.8


@torch.no_grad()
def attention(hf: Any, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """p (sequence, head, query, key) and v (sequence, head, key, dim) of each layer, as transformers computes them."""
    eager = copy.deepcopy(hf)
    eager.set_attn_implementation("eager")
    weights = eager(tokens, output_attentions=True, use_cache=False).attentions
    caches = [eager(tokens[i : i + 1], use_cache=True).past_key_values for i in range(len(tokens))]
    group = hf.config.num_attention_heads // caches[0].layers[0].values.shape[1]
    values = [
        torch.cat([cache.layers[n].values for cache in caches]).repeat_interleave(group, 1) for n in range(len(weights))
    ]
    return list(weights), values


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_equals_a_plain_loop(family: str) -> None:
    hf = tiny(family).hf
    tokens = prompts(rows=5)
    gates = calibrate(hf, [tokens[:2], tokens[2:]], SHARE)
    weights, values = attention(hf, tokens)
    for layer, (p, v) in enumerate(zip(weights, values, strict=True)):
        for head in range(p.shape[1]):
            threshold = -float(gates.bias[layer, head])
            total = opened = opened_by_less = closed = 0.0
            closed_values = torch.zeros(v.shape[-1])
            for sequence in range(len(tokens)):
                for query in range(LENGTH):
                    for key in range(query + 1):
                        weight = float(p[sequence, head, query, key])
                        total += weight
                        if weight > torch.tensor(threshold).exp():
                            opened += weight
                        else:
                            closed += weight
                            closed_values += weight * v[sequence, head, key]
                        if weight > torch.tensor(threshold + WIDTH).exp():
                            opened_by_less += weight
            assert opened >= SHARE * total - 1e-4
            assert opened_by_less < SHARE * total + 1e-4  # no larger threshold would do
            torch.testing.assert_close(gates.rest[layer, head], closed_values / closed, rtol=1e-4, atol=1e-4)
    assert not gates.query.any()
    assert not gates.key.any()


def test_the_model_has_the_share_that_was_asked_for() -> None:
    """In the first layer, whose inputs are those of the dense model."""
    hf = tiny("llama").hf
    tokens = prompts(rows=5)
    p = attention(hf, tokens)[0][0]
    before = hf(tokens).logits
    gates = calibrate(hf, [tokens], SHARE)
    assert torch.equal(hf(tokens).logits, before)
    assert not is_sparse(hf)
    make_sparse(hf, **vars(gates))
    with torch.no_grad(), record_open(hf, edges=True) as record:
        hf(tokens)
    kept = (p * record.edges[0]).sum((0, 2, 3)) / p.sum((0, 2, 3))
    assert (kept >= SHARE - 1e-4).all()
    again = calibrate(hf, [tokens], SHARE)  # of a sparse model, its attention without gates counts
    for name in ("bias", "rest"):
        torch.testing.assert_close(getattr(again, name), getattr(gates, name))
    assert is_sparse(hf)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_hidden_pairs_do_not_count(family: str) -> None:
    """Windows are shorter than the prompts: with all mass open, no edge that is seen is closed."""
    hf = tiny(family).hf
    make_sparse(hf, **vars(calibrate(hf, [prompts()], 1.0)))
    with torch.no_grad(), record_open(hf) as record:
        hf(prompts())
    assert record.open_share.min() == 1


def test_rest_values_help(trained: Model, trained_text: Path) -> None:
    """At the same thresholds, closed edges that carry the rest value change the model less than those without."""
    tokens = torch.tensor(trained.tokenizer(trained_text.read_text()).input_ids[:256]).view(4, 64)
    gates = calibrate(trained.hf, [tokens], 0.8)
    divergence = []
    for rest in (gates.rest, torch.zeros_like(gates.rest)):
        sparse = copy.deepcopy(trained.hf)
        make_sparse(sparse, **{**vars(gates), "rest": rest})
        divergence.append(judge(trained.hf, sparse, tokens).kl)
    assert divergence[0] < divergence[1]


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_a_share_is_checked(share: float) -> None:
    with pytest.raises(GatelensError, match="above 0 and at most 1"):
        calibrate(tiny("llama").hf, [prompts()], share)


def test_the_first_token_is_closed(trained: Model) -> None:
    """Gate logits from the plain attention weights and inputs of each layer; texts begin with the same token."""
    text = "Anna went to the park and bought a map. Then Anna looked for the camera, but it was not at the park. "
    tokens = torch.tensor(trained.tokenizer(text * 10).input_ids[:192]).view(6, 32)
    tokens[:, 0] = trained.tokenizer.bos_token_id or 1
    gates = calibrate(trained.hf, [tokens], SHARE, close_first=True)
    inputs = copy.deepcopy(trained.hf)
    x: list[Tensor] = []
    for layer in inputs.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *args: x.append(args[2]))
    weights, values = attention(trained.hf, tokens)
    with torch.no_grad():
        inputs(tokens)
    for layer, (p, v) in enumerate(zip(weights, values, strict=True)):
        offsets = torch.einsum("sjw,hw->shj", x[layer], gates.key[layer])
        logits = p.log() + gates.bias[layer][:, None, None] + offsets[:, :, None]
        closed = torch.where(logits > 0, 0.0, p)
        assert (logits[..., 0] < 0).all()
        rest = torch.einsum("shij,shjd->hd", closed, v) / closed.sum((0, 2, 3))[:, None]
        torch.testing.assert_close(gates.rest[layer], rest, rtol=1e-3, atol=1e-4)
        mean, first = x[layer][:, 1:].mean((0, 1)), x[layer][:, 0].mean(0)
        at_mean, at_first = (gates.bias[layer] + gates.key[layer] @ position for position in (mean, first))
        kept = torch.where(p.log() + at_mean[:, None, None] > 0, p, 0.0)[..., 1:, 1:].sum((0, 2, 3))
        assert (kept >= (SHARE - 1e-4) * p[..., 1:, 1:].sum((0, 2, 3))).all()
        torch.testing.assert_close(at_first, at_mean - at_mean.clamp(min=0) - 2, rtol=1e-3, atol=1e-3)


def test_first_tokens_that_are_not_set_apart_have_no_offsets() -> None:
    """In the first layer first tokens are like all others; of one sequence nothing can be said."""
    hf = tiny("llama").hf
    gates = calibrate(hf, [prompts(rows=5)], SHARE, close_first=True)
    assert not gates.key[0].any()
    assert all(values.isfinite().all() for values in (gates.bias, gates.key, gates.rest))
    assert not calibrate(hf, [prompts(rows=1)], SHARE, close_first=True).key.any()

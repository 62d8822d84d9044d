"""The gated-attention operator against the plain version in `plain_attention`."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from plain_attention import noise_of, plain_attention
from scipy import stats
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.sparse import _tiles
from gatelens.sparse.gated_attention import gated_attention

GATES = ["score", "probability"]


def inputs(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, queries: int = 70, keys: int = 70, dim: int = 5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim + 1)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return (2 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()


def sees(queries: int, keys: int, causal: bool = True, window: int | None = None) -> Tensor:
    """(query, key), by position."""
    query, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    visible = (key <= query) if causal else torch.ones(queries, keys, dtype=torch.bool)
    return visible if window is None else visible & (key > query - window)


PADDING = torch.ones(2, 70, dtype=torch.bool)
PADDING[0, :9] = False
PADDING[1, 50:] = False
PADDED = sees(70, 70) & PADDING[:, None, :] & PADDING[:, :, None]
RANDOM = torch.rand(2, 4, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.3
BLOCKWISE = torch.zeros(70, 70, dtype=torch.bool)
BLOCKWISE[3:40, 20:30] = True

# name: (sizes, arguments, which pairs are visible)
CASES: dict[str, tuple[dict[str, int], dict[str, Any], Tensor]] = {
    "causal": ({}, {}, sees(70, 70)),
    "not causal": ({}, {"causal": False}, sees(70, 70, causal=False)),
    "one kv head": ({"kv_heads": 1}, {}, sees(70, 70)),
    "no groups": ({"kv_heads": 4}, {}, sees(70, 70)),
    "decoding": ({"queries": 1}, {}, sees(1, 70)),
    "after a cache": ({"queries": 40}, {}, sees(40, 70)),
    "cross": ({"queries": 40}, {"causal": False}, sees(40, 70, causal=False)),
    "window": ({}, {"window": 7}, sees(70, 70, window=7)),
    "window after a cache": ({"queries": 40}, {"window": 33}, sees(40, 70, window=33)),
    "padding": ({}, {"padding": PADDING}, PADDED[:, None]),
    "padded keys": ({}, {"padding": PADDING, "causal": False}, PADDING[:, None, None, :]),
    "window and padding": ({}, {"window": 7, "padding": PADDING.int()}, (PADDED & sees(70, 70, window=7))[:, None]),
    "mask of each head": ({}, {"mask": RANDOM}, RANDOM & sees(70, 70)),
    "mask of each row": ({}, {"mask": RANDOM[:, :1], "causal": False}, RANDOM[:, :1]),
    "mask of all": ({}, {"mask": BLOCKWISE, "causal": False}, BLOCKWISE),
    "mask of keys": ({}, {"mask": PADDING[:, None, None, :]}, PADDING[:, None, None] & sees(70, 70)),
    "temperature": ({}, {"temperature": 0.3}, sees(70, 70)),
    "temperature and padding": ({}, {"temperature": 2.0, "padding": PADDING}, PADDED[:, None]),
    "soft cap": ({}, {"softcap": 1.5, "scale": 0.8}, sees(70, 70)),
    "one bias per head": ({}, {"bias": torch.tensor([0.3, -1.0, 0.0, 2.0], dtype=torch.float64)}, sees(70, 70)),
    "nothing visible": ({}, {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, torch.zeros(70, 70).bool()),
}


def gate_inputs(gate: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """What a gate may depend on besides the scores; in the score gauge the paper has none of these."""
    if gate == "score":
        return {}
    generator = torch.Generator().manual_seed(7)
    batch, heads, queries, _ = q.shape
    shapes = {
        "query_offset": (batch, heads, queries),
        "key_offset": (batch, heads, k.shape[2]),
        "rest": (heads, v.shape[-1]),
    }
    made = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    made["query_offset"] += 4.5  # about half of the gates are open
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def compare(name: str, gate: str, sample: bool, straight_through: bool = False) -> None:
    """Outputs and gradients of the operator and of the plain version."""
    sizes, arguments, visible = CASES[name]
    q, k, v = inputs(**sizes)
    given = {"bias": 0.5, **arguments}
    bias = torch.as_tensor(given.pop("bias"), dtype=torch.float64).expand(q.shape[1]).clone().requires_grad_()
    shape = (*q.shape[:3], k.shape[2])
    visible = visible.expand(shape)
    options = {"gate": gate, "straight_through": straight_through, **gate_inputs(gate, q, k, v)}
    options |= {key: given.pop(key) for key in ("scale", "softcap", "temperature") if key in given}
    noise = noise_of(3, shape, k.shape[1]) if sample else None
    generator = torch.Generator().manual_seed(3)
    ours = gated_attention(q, k, v, bias, sample=sample, generator=generator, return_open=True, **given, **options)
    plain = plain_attention(q, k, v, bias, visible, noise=noise, **options)

    for actual, right in zip(ours, (plain.z, plain.expected_open, plain.gates), strict=True):
        torch.testing.assert_close(actual, right)
    torch.testing.assert_close(ours.open_share, plain.open.sum((-1, -2)) / visible.sum((-1, -2)).clamp(min=1))
    torch.testing.assert_close(ours.expected_keys, plain.chances.sum(-1))
    assert torch.equal(ours.open_keys, plain.open.sum(-1))
    assert torch.equal(ours.visible_keys, visible.sum(-1))
    assert torch.equal(ours.pairs, visible.sum((-1, -2)))
    inputs_of_gradient = {"q": q, "k": k, "v": v, "bias": bias} | {
        key: value for key, value in options.items() if isinstance(value, Tensor)
    }
    dz, dexpected, dkeys = (torch.randn_like(x) for x in (plain.z, plain.expected_open, plain.chances[..., 0]))
    gradients = [
        torch.autograd.grad(outputs, list(inputs_of_gradient.values()), [dz, 50 * dexpected, dkeys])
        for outputs in (
            [ours[0], ours[1], ours.expected_keys],
            [plain.z, plain.expected_open, plain.chances.sum(-1)],
        )
    ]
    for key, actual, right in zip(inputs_of_gradient, *gradients, strict=True):
        torch.testing.assert_close(actual, right, msg=lambda text, key=key: f"gradient of {key}: {text}")


@pytest.mark.parametrize("mode", ["inference", "training", "straight through"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_version(name: str, gate: str, mode: str) -> None:
    compare(name, gate, sample=mode == "training", straight_through=mode == "straight through")


@pytest.mark.parametrize("size", [1, 70 * 2 * 32 * 3])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", ["causal", "window and padding", "mask of each head"])
def test_does_not_depend_on_the_tile_size(monkeypatch: pytest.MonkeyPatch, name: str, gate: str, size: int) -> None:
    """Tiles of a single head and of a few sequences of the batch; the noise is the same too."""
    monkeypatch.setitem(_tiles.TILE_SIZE, "cpu", size)
    compare(name, gate, sample=True)


@pytest.mark.parametrize("gate", GATES)
def test_about_half_of_the_gates_are_open(gate: str) -> None:
    """Else the comparisons would show little."""
    q, k, v = inputs()
    result = gated_attention(q, k, v, 0.5, gate=gate, **gate_inputs(gate, q, k, v))
    assert 0.2 < result.open_share.mean() < 0.8


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 3}, {"causal": False}])
def test_finite_differences(gate: str, options: dict[str, Any]) -> None:
    """Gates that are not sampled have their true derivative."""
    q, k, v = inputs(batch=1, queries=5, keys=7, dim=3)
    bias = torch.tensor([0.3, -0.4, 0.1, 0.2], dtype=torch.float64, requires_grad=True)
    more = gate_inputs("probability", q, k, v)  # offsets and rest values may be given in both gauges

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(more, rest, strict=True))
        return gated_attention(q, k, v, bias, gate=gate, **named, **options)[:2]

    assert torch.autograd.gradcheck(run, (q, k, v, bias, *more.values()))


@pytest.mark.parametrize("gate", GATES)
def test_finite_differences_of_open_gates(gate: str) -> None:
    """Sampled gates have their true derivative too where all of them are open."""
    q, k, v = inputs(batch=1, queries=5, keys=7, dim=3)
    assert torch.autograd.gradcheck(lambda *x: gated_attention(*x, 80.0, sample=True, gate=gate)[0], (q, k, v))


@pytest.mark.parametrize("gate", GATES)
def test_open_gates_are_softmax_attention(gate: str) -> None:
    q, k, v = (x.detach().float() for x in inputs())
    v = v[..., :-1]
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for bias in (30.0, 1e6, math.inf):
        for sample in (False, True):
            y, expected, _ = gated_attention(q, k, v, bias, sample=sample, gate=gate)
            torch.testing.assert_close(y, dense, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(expected, torch.ones(2, 4))
    y, expected, edges = gated_attention(q, k, v, -math.inf, return_open=True, gate=gate)
    assert edges is not None
    assert not y.any()
    assert not expected.any()
    assert not edges.any()


def test_a_score_that_cancels_the_bias_is_closed() -> None:
    """The gate is open for s + b > 0 only, not for 0."""
    zeros = torch.zeros(1, 1, 3, 4)
    result = gated_attention(zeros, zeros, zeros + 1)
    assert not result[0].any()
    assert result.open_share.item() == 0
    assert result[1].item() == 0.5


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str, gate: str) -> None:
    """Shares and outputs of a padded sequence, whatever the padding holds, are those of the sequence alone."""
    options = {"bias": 0.2 if gate == "score" else 3.0, "gate": gate, "rest": torch.ones(4, 6).double()}
    q, k, v = inputs(batch=1, queries=20, keys=20)
    bare = gated_attention(q, k, v, **options)
    extra, where = inputs(batch=1, queries=13, keys=13, seed=1), slice(13, 33) if side == "left" else slice(0, 20)
    pairs = list(zip(extra, (q, k, v), strict=True))
    longer = [torch.cat(pair if side == "left" else pair[::-1], 2) for pair in pairs]
    padding = torch.zeros(1, 33, dtype=torch.bool)
    padding[:, where] = True
    padded = gated_attention(*longer, padding=padding, **options)
    torch.testing.assert_close(padded[0][:, :, where], bare[0])
    torch.testing.assert_close(padded[1], bare[1])
    assert torch.equal(padded.open_share, bare.open_share)
    assert torch.equal(padded.pairs, bare.pairs)
    assert padded[0].count_nonzero() == bare[0].count_nonzero(), "padding attends to something"


def test_noise_is_logistic() -> None:
    noise = noise_of(0, (1, 2, 256, 256), 1)
    assert stats.kstest(noise.flatten().numpy(), "logistic").pvalue > 0.01
    assert torch.isfinite(noise).all()
    # Independent between queries, keys and heads: products of standardised noise have mean 0 and variance 1.
    unit = (noise - noise.mean()) / noise.std()
    for product in (unit[..., 1:] * unit[..., :-1], unit[:, :, 1:] * unit[:, :, :-1], unit[:, 1:] * unit[:, :-1]):
        assert abs(product.mean().item()) * product.numel() ** 0.5 < 4
        assert abs(product.var().item() - 1) < 0.05


def test_gates_open_as_often_as_expected() -> None:
    q, k, v = (x.detach().float() for x in inputs(batch=8, queries=200, keys=200))
    torch.manual_seed(0)
    for gate, bias in (("score", -4.0), ("score", 0.0), ("score", 2.0), ("probability", 0.0), ("probability", 5.0)):
        result = gated_attention(q, k, v, bias, sample=True, return_open=True, gate=gate)
        drawn = result[2].sum((-1, -2)) / result.pairs  # type: ignore[union-attr]
        torch.testing.assert_close(drawn.mean(), result[1].mean(), rtol=0, atol=0.004)


def test_sampling_follows_the_generator() -> None:
    q, k, v = inputs()

    def draw(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return gated_attention(q, k, v, sample=True, generator=generator)[0]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    torch.manual_seed(5)
    first = draw(None)
    assert not torch.equal(first, draw(None))
    torch.manual_seed(5)
    assert torch.equal(first, draw(None))


@pytest.mark.parametrize("gate", GATES)
def test_half_precision_computes_in_single(gate: str) -> None:
    q, k, v = (x.detach().to(torch.bfloat16).requires_grad_() for x in inputs())
    options = {key: tensor.bfloat16() for key, tensor in gate_inputs(gate, q, k, v).items()}
    y, expected, _ = gated_attention(q, k, v, 0.5, gate=gate, **options)
    wide = {key: tensor.float() for key, tensor in options.items()}
    exact, share, _ = gated_attention(q.float(), k.float(), v.float(), 0.5, gate=gate, **wide)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.to(torch.bfloat16))
    assert torch.equal(expected, share)
    y.float().square().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("gate", GATES)
def test_mixed_precision_does_not_reach_the_scores(gate: str) -> None:
    q, k, v = (x.detach().float() for x in inputs())
    bare = gated_attention(q, k, v, 0.5, gate=gate)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gated_attention(q, k, v, 0.5, gate=gate)[0], bare)


@pytest.mark.parametrize("gate", GATES)
def test_nothing_quadratic_is_kept_for_backward(gate: str) -> None:
    q, k, v = inputs(queries=512, keys=512)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        gated_attention(q, k, v, 0.5, sample=True, gate=gate, **gate_inputs(gate, q, k, v))
    assert 0 < sum(saved) <= 2 * sum(x.numel() for x in (q, k, v))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(2, 4, 70)}, "fit together"),
        ({"q": torch.zeros(2, 3, 70, 5)}, "divide"),
        ({"q": torch.zeros(2, 4, 71, 5)}, "more queries than keys"),
        ({"window": 0}, "window"),
        ({"window": 3, "causal": False}, "causal"),
        ({"padding": torch.ones(2, 69).bool()}, "padding"),
        ({"padding": torch.zeros(2, 70)}, "padding"),
        ({"mask": torch.zeros(70, 70)}, "boolean"),
        ({"mask": torch.ones(70, 71).bool()}, "broadcast"),
        ({"bias": torch.ones(3)}, "bias"),
        ({"gate": "entropy"}, "score, probability"),
        ({"query_offset": torch.zeros(2, 4, 69)}, "query_offset"),
        ({"key_offset": torch.zeros(2, 2, 70)}, "key_offset"),
        ({"rest": torch.zeros(4, 5)}, "rest"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], says: str) -> None:
    q, k, v = inputs()
    unchecked = inspect.unwrap(gated_attention)  # the tests check shapes before the operator does
    with pytest.raises(GatelensError, match=says):
        unchecked(**{"q": q, "k": k, "v": v, **change})

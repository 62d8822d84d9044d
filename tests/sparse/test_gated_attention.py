"""The gated-attention operator against a plain version that holds whole (query, key) matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.sparse import blocks as attention_blocks
from gatelens.sparse.blocks import hash_uniform, noise_integers
from gatelens.sparse.gated_attention import gated_attention

CPU = torch.device("cpu")


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: float | Tensor,
    visible: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, line by line. visible: (batch, head, query, key); noise: logit(U) of the same shape."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    logits = s + (bias[..., None, None] if isinstance(bias, Tensor) else bias)
    gates = (logits if noise is None else logits + noise) > 0
    a = gates.to(s.dtype)
    if noise is not None:
        soft = torch.sigmoid(logits + noise)
        a = a + (soft - soft.detach())
    weights = torch.softmax(s.masked_fill(~visible, -math.inf), -1).nan_to_num(0.0)
    expected = (torch.sigmoid(logits) * visible).sum((-1, -2)) / visible.sum((-1, -2)).clamp(min=1)
    return (weights * a) @ v, expected, gates & visible


def noise_of(seed: int, shape: tuple[int, int, int, int], kv_heads: int) -> Tensor:
    """The logistic noise that gated_attention draws from a generator with this seed, for all pairs."""
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)
    integers = noise_integers((batch, kv_heads, heads // kv_heads), queries, keys, CPU, generator)
    full = (batch, kv_heads, heads // kv_heads, queries, keys)
    scratch = (torch.empty(full, dtype=torch.int32) for _ in range(2))
    uniform = hash_uniform(*integers, torch.empty(full, dtype=torch.float64), *scratch)
    return torch.logit(1 - uniform).view(shape)


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
    "soft cap": ({}, {"softcap": 1.5, "scale": 0.8}, sees(70, 70)),
    "one bias per head": ({}, {"bias": torch.tensor([0.3, -1.0, 0.0, 2.0], dtype=torch.float64)}, sees(70, 70)),
    "nothing visible": ({}, {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, torch.zeros(70, 70).bool()),
}


def compare(name: str, sample: bool) -> None:
    """Outputs and gradients of the operator and of the plain version."""
    sizes, arguments, visible = CASES[name]
    q, k, v = inputs(**sizes)
    given = {"bias": 0.5, **arguments}
    bias = torch.as_tensor(given.pop("bias"), dtype=torch.float64).expand(q.shape[1]).clone().requires_grad_()
    shape = (*q.shape[:3], k.shape[2])
    visible = visible.expand(shape)
    noise = noise_of(3, shape, k.shape[1]) if sample else None
    generator = torch.Generator().manual_seed(3)
    options = {key: given[key] for key in ("scale", "softcap") if key in given}
    ours = gated_attention(q, k, v, bias, sample=sample, generator=generator, return_open=True, **given)
    theirs = plain(q, k, v, bias, visible, noise=noise, **options)

    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right)
    share = plain(q, k, v, bias, visible, **options)[2].sum((-1, -2)) / visible.sum((-1, -2)).clamp(min=1)
    torch.testing.assert_close(ours.open_share, share)
    assert torch.equal(ours.pairs, visible.sum((-1, -2)))
    dy = torch.randn(ours[0].shape, dtype=torch.float64)
    dexpected = torch.randn(ours[1].shape, dtype=torch.float64)
    gradients = [
        torch.autograd.grad([y, expected], (q, k, v, bias), [dy, 50 * dexpected]) for y, expected, _ in (ours, theirs)
    ]
    for name, mine, right in zip("qkvb", *gradients, strict=True):
        torch.testing.assert_close(mine, right, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("sample", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_version(name: str, sample: bool) -> None:
    compare(name, sample)


@pytest.mark.parametrize("size", [1, 70 * 2 * 32 * 3])
@pytest.mark.parametrize("name", ["causal", "window and padding", "mask of each head"])
def test_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    """Blocks of a single head and of a few rows of the batch; the noise is the same too."""
    monkeypatch.setitem(attention_blocks.BLOCK, "cpu", size)
    compare(name, sample=True)


def test_gradcheck() -> None:
    """Inference has the true derivative, and so has training with all gates open."""
    q, k, v = inputs(batch=1, queries=5, keys=7, dim=3)
    bias = torch.tensor([0.3, -0.4, 0.1, 0.2], dtype=torch.float64, requires_grad=True)
    for more in ({}, {"softcap": 2.0}, {"window": 3}, {"causal": False}):
        assert torch.autograd.gradcheck(lambda *x, more=more: gated_attention(*x, **more)[:2], (q, k, v, bias))
    assert torch.autograd.gradcheck(lambda *x: gated_attention(*x, bias + 60.0, sample=True)[0], (q, k, v))


def test_open_gates_are_softmax_attention() -> None:
    q, k, v = (x.detach().float() for x in inputs())
    v = v[..., :-1]
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for bias in (30.0, 1e6, math.inf):
        for sample in (False, True):
            y, expected, _ = gated_attention(q, k, v, bias, sample=sample)
            torch.testing.assert_close(y, dense, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(expected, torch.ones(2, 4))
    y, expected, edges = gated_attention(q, k, v, -math.inf, return_open=True)
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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    """Shares and outputs of a padded sequence, whatever lies in the padding, are those of the bare one."""
    q, k, v = inputs(batch=1, queries=20, keys=20)
    bare = gated_attention(q, k, v, 0.2)
    extra, where = inputs(batch=1, queries=13, keys=13, seed=1), slice(13, 33) if side == "left" else slice(0, 20)
    pairs = list(zip(extra, (q, k, v), strict=True))
    longer = [torch.cat(pair if side == "left" else pair[::-1], 2) for pair in pairs]
    padding = torch.zeros(1, 33, dtype=torch.bool)
    padding[:, where] = True
    padded = gated_attention(*longer, 0.2, padding=padding)
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
    for bias in (-4.0, 0.0, 2.0):
        result = gated_attention(q, k, v, bias, sample=True, return_open=True)
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


def test_half_precision_computes_in_single() -> None:
    q, k, v = (x.detach().to(torch.bfloat16).requires_grad_() for x in inputs())
    y, expected, _ = gated_attention(q, k, v, 0.5)
    exact, share, _ = gated_attention(q.float(), k.float(), v.float(), 0.5)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.to(torch.bfloat16))
    assert torch.equal(expected, share)
    y.float().square().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16


def test_mixed_precision_does_not_reach_the_scores() -> None:
    q, k, v = (x.detach().float() for x in inputs())
    bare = gated_attention(q, k, v, 0.5)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gated_attention(q, k, v, 0.5)[0], bare)


def test_nothing_quadratic_is_kept_for_backward() -> None:
    q, k, v = inputs(queries=512, keys=512)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        gated_attention(q, k, v, 0.5, sample=True)
    assert 0 < sum(kept) <= 2 * sum(x.numel() for x in (q, k, v))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(2, 4, 70)}, "fit together"),
        ({"q": torch.zeros(2, 3, 70, 5)}, "divide"),
        ({"q": torch.zeros(2, 4, 71, 5)}, "cannot be more"),
        ({"window": 0}, "window"),
        ({"window": 3, "causal": False}, "causal"),
        ({"padding": torch.ones(2, 69).bool()}, "padding"),
        ({"padding": torch.zeros(2, 70)}, "padding"),
        ({"mask": torch.zeros(70, 70)}, "boolean"),
        ({"mask": torch.ones(70, 71).bool()}, "broadcast"),
        ({"bias": torch.ones(3)}, "bias"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], says: str) -> None:
    q, k, v = inputs()
    with pytest.raises(GatelensError, match=says):
        gated_attention(**{"q": q, "k": k, "v": v, **change})

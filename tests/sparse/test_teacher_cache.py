"""A cached teacher: losses from its top k, records on disk, and runs that read them instead of the dense model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, prompts, tiny
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.sparsify import SparsifySettings, _losses, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._losses import losses
from gatelens.sparse.sparsify._teacher_cache import TeacherCache
from gatelens.sparse.sparsify._top_k import TopK, top_k_losses, top_k_of
from gatelens.sparse.sparsify._training import Training

FAST: dict[str, Any] = {"batch": 2, "length": 16, "lengths": (8, 16), "checkpoint_every": 1, "cooldown": 0.0}
ABOUT = {"model": "some", "bf16": False}


def random_logits(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*prompts().shape, VOCAB, generator=torch.Generator().manual_seed(seed))


def plain_losses(sparse: Tensor, dense: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """KL and cross-entropy of each sequence, token by token: the top k one by one, and the others as one."""
    p, q = dense.double().softmax(-1), sparse.double().softmax(-1)
    kl, ce = torch.zeros(len(tokens)).double(), torch.zeros(len(tokens)).double()
    length = tokens.shape[1]
    for sequence in range(len(tokens)):
        for token in range(length):
            order = p[sequence, token].argsort(descending=True)
            of_p, of_q = p[sequence, token][order], q[sequence, token][order]
            both = [(of_p[i], of_q[i]) for i in range(k)]
            if k < VOCAB:
                both.append((of_p[k:].sum(), of_q[k:].sum()))
            kl[sequence] += sum(a * (a.log() - b.log()) for a, b in both) / length
            if token + 1 < length:
                ce[sequence] -= q[sequence, token, tokens[sequence, token + 1]].log() / (length - 1)
    return kl, ce


@pytest.mark.parametrize("k", [1, 5, VOCAB - 1, VOCAB])
def test_losses_are_the_plain_ones(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and gradients through plain code, with chunks that end in the middle of a sequence."""
    monkeypatch.setattr(_losses, "CHUNK", 5 * VOCAB)
    tokens, dense, sparse = prompts(), random_logits(0), random_logits(1).requires_grad_()
    kl, ce, dense_ce = top_k_losses(sparse, top_k_of(dense, tokens, k), tokens)
    right_kl, right_ce = plain_losses(sparse, dense, tokens, k)
    torch.testing.assert_close(kl.double(), right_kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ce.double(), right_ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense_ce, losses(sparse, dense, tokens).dense_cross_entropy)
    weights = torch.linspace(-1, 2, len(tokens))
    gradient, right = (
        torch.autograd.grad((weights * a + weights.flip(0) * b).sum(), sparse)[0]
        for a, b in ((kl, ce), (right_kl, right_ce))
    )
    torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-6)


def test_the_whole_vocabulary_gives_the_exact_loss() -> None:
    tokens, dense, sparse = prompts(), random_logits(0), random_logits(1)
    for actual, right in zip(
        top_k_losses(sparse, top_k_of(dense, tokens, 10 * VOCAB), tokens), losses(sparse, dense, tokens), strict=True
    ):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)
    fewer = [top_k_losses(sparse, top_k_of(dense, tokens, k), tokens).kl for k in (1, 4, 16, VOCAB)]
    assert all((less <= more + 1e-6).all() for less, more in pairwise(fewer))


def test_the_gradient_by_finite_differences() -> None:
    tokens, dense, sparse = prompts(), random_logits(0, 1.0), random_logits(1, 1.0).requires_grad_()
    top = top_k_of(dense, tokens, 4)
    (gradient,) = torch.autograd.grad(top_k_losses(sparse, top, tokens).kl.sum(), sparse)
    direction = torch.randn_like(sparse, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        up, down = (plain_losses(sparse + e * direction, dense, tokens, 4)[0].sum() for e in (1e-4, -1e-4))
    assert (gradient * direction).sum().item() == pytest.approx(((up - down) / 2e-4).item(), rel=1e-3)


def test_models_that_are_certain() -> None:
    """Masses far below the rounding of 1, in either model, give finite losses and gradients."""
    tokens = prompts()
    for dense_scale, sparse_scale in ((1.0, 60.0), (60.0, 1.0), (60.0, 60.0)):
        dense, sparse = random_logits(0, dense_scale), random_logits(1, sparse_scale).requires_grad_()
        kl = top_k_losses(sparse, top_k_of(dense, tokens, 3), tokens).kl
        kl.sum().backward()
        assert kl.isfinite().all()
        assert sparse.grad is not None
        assert sparse.grad.isfinite().all()


class Counted:
    """A teacher whose forward passes are counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: Tensor) -> TopK:
        self.calls += 1
        noise = torch.Generator().manual_seed(int(tokens.sum()))
        return top_k_of(torch.randn(*tokens.shape, VOCAB, generator=noise), tokens, 4)


def equal(one: TopK, other: TopK) -> bool:
    return all(torch.equal(a.float(), b.float()) for a, b in zip(one, other, strict=True))


def test_records_are_read_back(tmp_path: Path) -> None:
    """By this cache and by a later one, in any order, for all lengths."""
    teacher = Counted()
    first, second = prompts(seed=3, rows=4, length=6), prompts(seed=4, rows=2, length=9)
    cache = TeacherCache(tmp_path / "cache", ABOUT, 4)
    values = [cache.read(tokens, teacher) for tokens in (first, second)]
    assert equal(values[0], teacher(first))
    calls = teacher.calls
    for again in (cache, TeacherCache(tmp_path / "cache", ABOUT, 4)):
        assert equal(again.read(second, teacher), values[1])
        reversed_values = again.read(first.flip(0), teacher)
        assert equal(reversed_values, TopK(*(x.flip(0) for x in values[0])))
    assert teacher.calls == calls
    cache.read(torch.cat([first[:1], prompts(seed=5, rows=1, length=6)]), teacher)
    assert teacher.calls == calls + 1
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {"teacher.json", "6.records", "9.records", ".lock"}


def test_a_record_that_was_cut_or_damaged_is_computed_again(tmp_path: Path) -> None:
    teacher, tokens = Counted(), prompts(seed=3, rows=3, length=6)
    values = TeacherCache(tmp_path / "cache", ABOUT, 4).read(tokens, teacher)
    file = tmp_path / "cache" / "6.records"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    for contents in (whole[:-7], whole[: len(whole) // 3 + 1], bytes(damaged)):
        file.write_bytes(contents)
        calls = teacher.calls
        for _ in range(2):  # the second one finds what the first one wrote
            assert equal(TeacherCache(tmp_path / "cache", ABOUT, 4).read(tokens, teacher), values)
            assert teacher.calls == calls + 1


def test_two_processes_write_to_one_cache(tmp_path: Path) -> None:
    """Each finds its own records, and a third one finds all of them."""
    teacher = Counted()
    one, other = (TeacherCache(tmp_path / "cache", ABOUT, 4) for _ in range(2))
    texts = [prompts(seed=seed, rows=2, length=6) for seed in range(4)]
    values = [cache.read(tokens, teacher) for tokens, cache in zip(texts, (one, other, one, other), strict=True)]
    calls, third = teacher.calls, TeacherCache(tmp_path / "cache", ABOUT, 4)
    for tokens, right in zip(texts, values, strict=True):
        assert equal(third.read(tokens, teacher), right)
    assert equal(one.read(texts[2], teacher), values[2])
    assert teacher.calls == calls


def test_the_cache_of_another_teacher_is_refused(tmp_path: Path) -> None:
    TeacherCache(tmp_path / "cache", ABOUT, 4)
    for about, top, says in (({**ABOUT, "model": "other"}, 4, "another model"), (ABOUT, 5, "another top")):
        with pytest.raises(GatelensError, match=says):
            TeacherCache(tmp_path / "cache", about, top)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "letter.txt").write_text("Dear Lily")
    with pytest.raises(GatelensError, match="holds other files"):
        TeacherCache(tmp_path / "files", ABOUT, 4)


def log_of(folder: Path, name: str) -> list[float]:
    return [row[name] for row in Log(folder, 10**9).records]


def test_runs_that_share_a_cache(base: Model, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, with an empty one, stopped half-way, and with a full one: the losses are the same.

    Only the first run with the cache runs the dense model, once for each step.
    """
    calls: list[int] = []
    dense_logits = Training._dense_logits

    def counted(self: Training, tokens: Tensor) -> Tensor:
        calls.append(len(tokens))
        return dense_logits(self, tokens)

    monkeypatch.setattr(Training, "_dense_logits", counted)
    settings = SparsifySettings(steps=4, teacher_top=8, hold="loss", **FAST)
    sparsify(base, text, settings, out=tmp_path / "none")
    calls.clear()
    sparsify(base, text, settings.replace(steps=2), out=tmp_path / "first", teacher_cache=tmp_path / "cache")
    sparsify(base, text, settings, out=tmp_path / "first", teacher_cache=tmp_path / "cache")
    assert len(calls) == 4
    sparsify(base, text, settings, out=tmp_path / "second", teacher_cache=tmp_path / "cache")
    assert len(calls) == 4
    for name in ("loss", "kl", "above_dense"):
        right = log_of(tmp_path / "none", name)
        assert len(right) == 4
        assert log_of(tmp_path / "first", name) == log_of(tmp_path / "second", name) == right


def test_a_cache_implies_its_size(text: Path, tmp_path: Path) -> None:
    """By default it has 64 tokens of 100, and the KL is a lower bound; with all tokens it is exact."""
    model = tiny("llama")
    settings = SparsifySettings(steps=1, **FAST)
    sparsify(model, text, settings, out=tmp_path / "exact")
    sparsify(model, text, settings, out=tmp_path / "cached", teacher_cache=tmp_path / "cache")
    whole = settings.replace(teacher_top=VOCAB)
    sparsify(model, text, whole, out=tmp_path / "whole", teacher_cache=tmp_path / "all")
    exact, cached, all_tokens = (log_of(tmp_path / name, "kl")[0] for name in ("exact", "cached", "whole"))
    assert all_tokens == pytest.approx(exact, rel=1e-4)
    assert 0 < cached < exact
    more = settings.replace(teacher_top=VOCAB + 1)  # there are not more
    sparsify(model, text, more, out=tmp_path / "more", teacher_cache=tmp_path / "all")
    assert log_of(tmp_path / "more", "kl")[0] == all_tokens
    with pytest.raises(GatelensError, match="another teacher_top"):
        sparsify(model, text, settings, out=tmp_path / "cached")

"""Sparse post-training on tiny models: what is minimised, what is read, what is refused, what comes out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from families import VOCAB, prompts, tiny
from simple_settings import SIMPLE
from torch import Tensor
from transformers import AutoModelForCausalLM

import gatelens
from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.report.run_figures import draw_run
from gatelens.runtime import precision
from gatelens.runtime.journal import Journal
from gatelens.sparse.adapters import apply_adapter, base_of, is_adapter
from gatelens.sparse.in_model import gate_biases, is_sparse, make_sparse
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.recording import record_open
from gatelens.sparse.sparsify import SparsifySettings, _losses, evaluate, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._losses import losses
from gatelens.sparse.sparsify._own_text import write_text
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training
from gatelens.sparse.text import read_tokens, sequences

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SMALL: dict[str, Any] = {**SIMPLE, "batch": 2, "length": 8, "checkpoint_every": 2}


def logits(hf: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return hf(input_ids=tokens).logits


# --- Losses ---


def test_losses_are_the_plain_ones(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, with chunks that end in the middle of a sequence; logits are not changed."""
    monkeypatch.setattr(_losses, "CHUNK", 5 * VOCAB)
    tokens = prompts()
    tokens[:, 2] = 0  # token 0 is a label like any other
    other = tiny("llama", seed=1).hf
    dense, sparse = logits(llama.hf, tokens), logits(other, tokens).requires_grad_()
    before = dense.clone()
    ours = losses(sparse, dense, tokens)
    p, q = dense.double().log_softmax(-1), sparse.double().log_softmax(-1)
    plain_kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    plain_ce, dense_ce = (-x[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].mean(-1) for x in (q, p))
    for actual, right in zip(ours, (plain_kl, plain_ce, dense_ce), strict=True):
        torch.testing.assert_close(actual.double(), right, **CLOSE)
    torch.testing.assert_close(plain_ce.mean().float(), other(input_ids=tokens, labels=tokens).loss)
    weights = torch.linspace(-1, 2, len(tokens))
    gradient, right = (
        torch.autograd.grad((weights * kl + weights.flip(0) * ce).sum(), sparse)[0]
        for kl, ce in ((ours.kl, ours.cross_entropy), (plain_kl, plain_ce))
    )
    torch.testing.assert_close(gradient, right, **CLOSE)
    assert torch.equal(dense, before)
    assert losses(dense, dense, tokens).kl.abs().max() < 1e-6


# --- What is read ---


def test_own_text_is_sampled_from_the_model(llama: Model, tmp_path: Path) -> None:
    """The share of its tokens that are the model's first choice is about the first choice's probability."""
    text = prompts(rows=4, length=16)
    own = write_text(llama, text, 70, 12, seed=0, journal=Journal(tmp_path))
    assert own.shape == (70, 12)
    assert len(own.unique(dim=0)) == 70
    probability = logits(llama.hf, own[:, :-1]).softmax(-1)
    best, choice = probability.max(-1)
    agree = (choice == own[:, 1:]).float()
    assert abs(agree.mean() - best.mean()) < 3 * (best.mean() / agree.numel()) ** 0.5
    again = write_text(llama, text, 70, 12, seed=0, journal=Journal())
    assert torch.equal(again, own)
    assert len(list(tmp_path.iterdir())) == 3
    assert not torch.equal(write_text(llama, text, 70, 12, seed=1, journal=Journal()), own)


# --- Training ---


def test_edges_close_and_the_loss_stays(trained: Model, trained_text: Path) -> None:
    settings = SparsifySettings(
        **{**SIMPLE, "steps": 25, "batch": 4, "length": 32, "warmup": 3, "bias_learning_rate": 0.4, "target": 0.1}
    )
    before = copy.deepcopy(trained.hf.state_dict())
    start = copy.deepcopy(trained)
    make_sparse(start.hf, 3.0)
    first = evaluate(start, trained_text, trained, length=32)["sentences"]
    sparse = sparsify(trained, trained_text, settings)
    last = evaluate(sparse, trained_text, trained, length=32)["sentences"]
    assert last.open_share < 0.9 * first.open_share
    assert last.kl < settings.target
    assert gate_biases(sparse.hf).std() > 0
    assert not is_sparse(trained.hf)
    assert all(torch.equal(before[name], weight) for name, weight in trained.hf.state_dict().items())


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_the_result_opens_everywhere(family: str, weights: Any, text: Path, tmp_path: Path) -> None:
    model = tiny(family)
    settings = SparsifySettings(steps=3, weights=weights, learning_rate=1e-2, target=1.0, **SMALL)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text())
    sparse = sparsify(model, text, settings, out=tmp_path / "run", held_out=other)
    right = logits(sparse.hf, prompts())
    assert not torch.allclose(right, logits(model.hf, prompts()), atol=0.01)
    assert torch.equal(logits(gatelens.load(tmp_path / "run").hf, prompts()), right)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run"), prompts()), right)
    card = (tmp_path / "run" / "README.md").read_text()
    found = evaluate(sparse, other, model, length=8, n_sequences=8)["other"]
    losses = f"{found.sparse_loss:.4f} | {found.above_dense:+.4f} | {found.kl:.4f}"
    assert f"{losses} | {found.keys_per_query:.2f} | {100 * found.open_share:.2f} %" in card
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 4
    assert len(json.loads((tmp_path / "run" / "log.json").read_text())) == 3
    assert [path.name for path in draw_run(tmp_path / "run")] == ["training.png"]


def test_a_bias_on_a_schedule(llama: Model, text: Path) -> None:
    settings = SparsifySettings(steps=5, learn_bias=False, bias=4.0, bias_end=-1.0, bias_steps=4, **SMALL)
    assert [settings.bias_at(step) for step in range(6)] == [4.0, 2.75, 1.5, 0.25, -1.0, -1.0]
    sparse = sparsify(llama, text, settings)
    assert gate_biases(sparse.hf).unique().tolist() == [-1.0]


def test_learning_rates_are_a_trapezium() -> None:
    settings = SparsifySettings(steps=20, warmup=4, cooldown=0.25)
    factors = [settings.rate_factor(step) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:16] == [1.0] * 12
    assert factors[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def log_of(folder: Path, name: str = "loss") -> list[float]:
    return [row[name] for row in Log(folder, 10**9).records]


def test_the_loss_is_mixed(llama: Model, text: Path, tmp_path: Path) -> None:
    """With gates that are all open the first step measures the dense model, whose KL is 0."""
    open_ = {**SMALL, "steps": 1, "bias": 1e4, "target": 0.5}
    tokens = torch.tensor(read_tokens(llama.tokenizer, text, 8).tokens)
    numbered = TrainingSequences([TrainingText("words", tokens, None, 1.0, 1.0)], 0)
    first = numbered.batch([(0, 0), (1, 0)], 8).tokens
    dense = llama.hf(input_ids=first, labels=first).loss.item()
    for kl, relative, right in [(1.0, True, 0.0), (0.0, True, 0.0), (0.0, False, dense), (0.25, False, 0.75 * dense)]:
        out = tmp_path / f"{kl}-{relative}"
        sparsify(llama, text, SparsifySettings(**{**open_, "kl": kl, "relative": relative}), out=out)
        assert log_of(out)[0] == pytest.approx(right, abs=2e-5)
        assert log_of(out, "cross_entropy")[0] == pytest.approx(dense, abs=2e-5)
        assert log_of(out, "open") == log_of(out, "expected_open") == [1.0]


def test_a_clipped_gradient(llama: Model, text: Path) -> None:
    """Adam is scaled by its second moment, so one step looks the same; plain gradients show the limit."""
    settings = SparsifySettings(**{**SMALL, "steps": 1, "clip": 1e-3, "bias": 1.0})
    tokens = torch.tensor(read_tokens(llama.tokenizer, text, 8).tokens)
    student = Student(llama, settings, share=True)
    numbered = TrainingSequences([TrainingText("words", tokens, None, 1.0, 1.0)], 0)
    training = Training(student, llama.hf, numbered, settings, Accelerator(cpu=True))
    training.step(0)
    norm = torch.stack([weight.grad.norm() for weight in student.weights() if weight.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert torch.stack([bias.grad.norm() for bias in student.biases() if bias.grad is not None]).norm() > 1e-3


def test_accumulated_batches_are_one_batch(llama: Model, text: Path, tmp_path: Path) -> None:
    """Also with gradients computed anew: the noise of a gate belongs to its row."""
    runs = {"whole": {"batch": 4}, "halves": {"accumulate": 2}, "again": {"batch": 4, "gradient_checkpointing": True}}
    for name, changes in runs.items():
        settings = SparsifySettings(steps=3, **{**SMALL, "learning_rate": 1e-2, **changes})
        sparsify(llama, text, settings, out=tmp_path / name)
    for name in ("loss", "expected_open"):
        right = log_of(tmp_path / "whole", name)
        assert log_of(tmp_path / "halves", name) == pytest.approx(right, rel=1e-4)
        assert log_of(tmp_path / "again", name) == pytest.approx(right, rel=1e-4)


def test_bfloat16(llama: Model, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_cpu_has_bfloat16", lambda: True)  # or imitated
    for bf16 in (False, True):
        sparsify(llama, text, SparsifySettings(steps=2, bf16=bf16, **SMALL), out=tmp_path / str(bf16))
    wide, narrow = log_of(tmp_path / "False", "cross_entropy"), log_of(tmp_path / "True", "cross_entropy")
    assert narrow == pytest.approx(wide, rel=0.02)
    assert narrow != wide


def test_tensorboard(llama: Model, text: Path, tmp_path: Path) -> None:
    sparsify(llama, text, SparsifySettings(steps=1, **SMALL), out=tmp_path, track="tensorboard")
    assert list(tmp_path.rglob("events.out*"))


# --- What is refused ---


def test_a_run_says_its_versions(llama: Model, text: Path, tmp_path: Path) -> None:
    sparsify(llama, text, SparsifySettings(**SMALL, steps=1), tmp_path / "run")
    said = json.loads((tmp_path / "run" / "settings.json").read_text())["versions"]
    assert said["torch"] == torch.__version__.split("+")[0] or said["torch"] == torch.__version__
    assert said["gatelens"] == gatelens.__version__


def test_divergence_keeps_the_last_checkpoint(llama: Model, text: Path, tmp_path: Path) -> None:
    settings = SparsifySettings(steps=50, weights="full", target=0.01, **{**SMALL, "learning_rate": 10.0})
    with pytest.raises(GatelensError, match=r"diverged at step \d+.*lower learning_rate"):
        sparsify(llama, text, settings, out=tmp_path)
    for weights in tmp_path.glob("checkpoints/*/weights.safetensors"):
        assert all(w.isfinite().all() for w in gatelens.runtime.journal.load_file(weights).values())


def test_another_run_in_the_same_folder(llama: Model, text: Path, tmp_path: Path) -> None:
    settings = SparsifySettings(steps=1, **SMALL)
    sparsify(llama, text, settings, out=tmp_path)
    more = SparsifySettings(steps=2, **SMALL)
    sparsify(llama, text, more, out=tmp_path)
    assert len(log_of(tmp_path)) == 2
    with pytest.raises(GatelensError, match="another target and rank"):
        sparsify(llama, text, SparsifySettings(steps=2, target=0.1, rank=4, **SMALL), out=tmp_path)
    with pytest.raises(GatelensError, match="another model"):
        sparsify(tiny("llama", seed=5), text, more, out=tmp_path)
    other = tmp_path / "words.txt"
    other.write_text("t3 " * 100)
    with pytest.raises(GatelensError, match="another text"):
        sparsify(llama, other, more, out=tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(GatelensError, match="other files already"):
        sparsify(llama, text, more, out=tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "steps is 0: it must be at least 1"),
        ({"length": 1}, "length is 1: it must be at least 2"),
        ({"streamed": 0}, "streamed is 0: it must be at least 1"),
        ({"target": 0.0}, "target is 0.0: it must be above 0"),
        ({"kl": 1.5}, "kl is 1.5: it must be at most 1"),
        ({"hold": "mse"}, "keys, loss"),
        ({"weights": "bitfit"}, "lora, full"),
        ({"multiplier": 0.01}, "between multiplier_low and multiplier_high"),
        ({"bias_end": 0.0}, "unset if the bias is learned"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be above 0"),
        ({"cooldown": 1.5}, "cooldown is 1.5: it must be at most 1"),
    ],
)
def test_settings_are_checked(changes: Any, says: str) -> None:
    with pytest.raises(GatelensError, match=says):
        SparsifySettings(**changes)


def test_what_cannot_be_trained(llama: Model, text: Path, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="no module of this model is called nowhere"):
        sparsify(llama, text, SparsifySettings(projections=("nowhere",), **SMALL))
    short = tmp_path / "short.txt"
    short.write_text("t3 t4")
    with pytest.raises(GatelensError, match="less than one sequence"):
        sparsify(llama, short, SparsifySettings(**SMALL), out=tmp_path / "a")
    with pytest.raises(GatelensError, match="from 2 to 64 tokens, which is what tiny-llama reads, not 65"):
        sparsify(llama, text, SparsifySettings(**{**SMALL, "length": 65}), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(GatelensError, match="cannot write to"):
        sparsify(llama, text, SparsifySettings(**SMALL), out=blocked / "run")
    with pytest.raises(GatelensError, match="dense"):
        evaluate(llama, text)


# --- Judging ---


def test_evaluate_counts_edges(llama: Model, text: Path) -> None:
    sparse = copy.deepcopy(llama)
    make_sparse(sparse.hf, torch.linspace(-2, 2, 12).view(3, 4))
    found = evaluate(sparse, text, length=8, n_sequences=5, skip=1, batch=2)["trained"]
    tokens = sequences(llama.tokenizer, text, 8)[1:6]
    with record_open(sparse.hf, edges=True) as record:
        ours = logits(sparse.hf, tokens)
    right = record.edges.sum((1, 3, 4)) / (5 * 36)
    torch.testing.assert_close(found.open_by_head.float(), right)
    assert found.open_share == pytest.approx(right.mean().item())
    torch.testing.assert_close(found.open_by_layer.float(), right.mean(1))
    to_first = record.edges[..., 0].sum() / record.edges.sum()
    assert found.to_first_share == pytest.approx(to_first.item())
    assert 0 < to_first < 1
    dense = logits(llama.hf, tokens)
    assert found.kl == pytest.approx(losses(ours, dense, tokens).kl.mean().item(), rel=1e-4)
    assert found.dense_loss == pytest.approx(llama.hf(input_ids=tokens, labels=tokens).loss.item(), rel=1e-5)
    assert found.above_dense == found.sparse_loss - found.dense_loss
    assert VOCAB == 100


# --- Adapters ---


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_adapter_is_the_merged_model(family: str, text: Path, tmp_path: Path) -> None:
    model = tiny(family)
    settings = SparsifySettings(steps=2, target=1.0, merge=False, **SMALL, learning_rate=1e-2)
    sparse = sparsify(model, text, settings, out=tmp_path)
    assert is_adapter(tmp_path)
    assert base_of(tmp_path) == model.name
    again = apply_adapter(copy.deepcopy(model.hf), tmp_path)
    torch.testing.assert_close(logits(again, prompts()), logits(sparse.hf, prompts()), **CLOSE)
    assert torch.equal(gate_biases(again), gate_biases(sparse.hf))
    with pytest.raises(GatelensError, match="belongs to another model"):
        apply_adapter(tiny("gpt_neox").hf, tmp_path)


def test_a_run_starts_from_another(llama: Model, text: Path, tmp_path: Path) -> None:
    fast = SparsifySettings(steps=2, target=1.0, **SMALL, learning_rate=1e-2)
    first = sparsify(llama, text, fast, out=tmp_path / "first")
    still = SparsifySettings(steps=1, target=1.0, **SMALL, learning_rate=1e-12, bias_learning_rate=1e-12)
    second = sparsify(llama, text, still, out=tmp_path / "second", start=tmp_path / "first")
    torch.testing.assert_close(logits(second.hf, prompts()), logits(first.hf, prompts()), **CLOSE)
    with pytest.raises(GatelensError, match="no checkpoint to start from"):
        sparsify(llama, text, still, start=tmp_path)
    with pytest.raises(GatelensError, match=r"do not have .* in the shape"):
        sparsify(llama, text, SparsifySettings(rank=4, **SMALL), start=tmp_path / "first")

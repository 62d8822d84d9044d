"""Conversion of nanoGPT checkpoints: against a plain forward over the checkpoint's own weights."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from commands import run
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoModelForCausalLM

import gatelens
from gatelens import GatelensError
from gatelens.loading.convert import convert_checkpoint
from gatelens.sparse.in_model import gate_biases, is_sparse
from gatelens.sparse.sparsify import SparsifySettings, sparsify

WIDTH, HEADS, LAYERS, LENGTH, PADDED = 48, 4, 2, 24, 128
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of 100 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    families.tokenizer().save_pretrained(folder)
    return str(folder)


def checkpoint(biases: bool = True, seed: int = 0) -> State:
    """Random weights of a tiny GPT-2 as nanoGPT stores it, vocabulary padded from 100 to 128."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    state = {"transformer.wte.weight": draw(PADDED, WIDTH), "transformer.wpe.weight": draw(LENGTH, WIDTH)}
    linears = {
        "attn.c_attn": (3 * WIDTH, WIDTH),
        "attn.c_proj": (WIDTH, WIDTH),
        "mlp.c_fc": (4 * WIDTH, WIDTH),
        "mlp.c_proj": (WIDTH, 4 * WIDTH),
    }
    for layer in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            state[f"transformer.h.{layer}.{norm}.weight"] = 1 + draw(WIDTH)
        for name, shape in linears.items():
            state[f"transformer.h.{layer}.{name}.weight"] = draw(*shape)
    state["transformer.ln_f.weight"] = 1 + draw(WIDTH)
    if biases:
        sizes = {name: len(value) for name, value in state.items() if ".h." in name or ".ln_f" in name}
        state |= {name.replace(".weight", ".bias"): draw(size) for name, size in sizes.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


def plain_forward(state: State, tokens: Tensor, gate_bias: float | None = None) -> Tensor:
    """Logits (prompt, position, vocabulary) by the checkpoint's own weights, written out.

    gate_bias: an attention edge counts only where its score plus the bias is above 0, without a new normalisation.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (WIDTH,), state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

    def apply(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    length = tokens.shape[1]
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][:length]
    hidden = torch.ones(length, length).triu(1).bool()
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in apply(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(WIDTH, -1)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -torch.inf)
        pattern = scores.softmax(-1)
        if gate_bias is not None:
            pattern = pattern * (scores + gate_bias > 0)
        x = x + apply((pattern @ v).transpose(1, 2).flatten(2), f"{h}.attn.c_proj")
        x = x + apply(gelu(apply(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")), f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ state["lm_head.weight"].T


def written(tmp_path: Path, data: Any) -> Path:
    torch.save(data, tmp_path / "final.pth")
    return tmp_path / "final.pth"


@pytest.mark.parametrize("biases", [True, False])
def test_logits_are_the_checkpoints(biases: bool, words: str, tmp_path: Path) -> None:
    state = checkpoint(biases)
    convert_checkpoint(written(tmp_path, state), tmp_path / "out", tokenizer=words, heads=HEADS)
    model = gatelens.load(tmp_path / "out")
    tokens = families.prompts(length=12)
    assert model.hf.config.vocab_size == families.VOCAB
    torch.testing.assert_close(
        model.hf(tokens).logits, plain_forward(state, tokens)[..., : families.VOCAB], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("bias", [0.0, 0.4])
def test_a_gated_model(bias: float, words: str, tmp_path: Path) -> None:
    state = checkpoint()
    converted = convert_checkpoint(written(tmp_path, state), tmp_path / "out", tokenizer=words, heads=HEADS, bias=bias)
    model = gatelens.load(tmp_path / "out")
    assert is_sparse(model.hf)
    assert gate_biases(model.hf).eq(bias).all()
    assert "gated attention" in str(converted)
    tokens = families.prompts(length=12)
    logits = model.hf(tokens).logits
    torch.testing.assert_close(logits, plain_forward(state, tokens, bias)[..., : families.VOCAB], atol=1e-4, rtol=1e-4)
    assert (logits - plain_forward(state, tokens)[..., : families.VOCAB]).abs().max() > 0.01  # some gates are closed


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state, "model_args": {"n_head": HEADS}, "iter_num": 3, "best_val_loss": 2.0},
        lambda state: {"model_state_dict": {f"_orig_mod.{k}": v for k, v in state.items()}},
        lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()},
        lambda state: {"state_dict": {**state, "transformer.h.0.attn.bias": torch.ones(1, 1, LENGTH, LENGTH)}},
        lambda state: {key: value for key, value in state.items() if key != "lm_head.weight"},
    ],
    ids=["nanoGPT", "compiled", "data parallel", "with masks", "without head"],
)
def test_every_wrapping(wrap: Any, words: str, tmp_path: Path) -> None:
    state = checkpoint()
    convert_checkpoint(written(tmp_path, wrap(state)), tmp_path / "out", tokenizer=words, heads=HEADS)
    tokens = families.prompts(length=5)
    logits = gatelens.load(tmp_path / "out", check=False).hf(tokens).logits
    torch.testing.assert_close(logits, plain_forward(state, tokens)[..., : families.VOCAB], atol=1e-4, rtol=1e-4)


def test_heads_are_taken_from_the_checkpoint(words: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"model": checkpoint(), "model_args": {"n_head": 8}})
    assert convert_checkpoint(path, tmp_path / "out", tokenizer=words).heads == 8


def test_an_untied_head_stays_its_own(words: str, tmp_path: Path) -> None:
    state = checkpoint()
    state["lm_head.weight"] = state["lm_head.weight"].flip(0)
    convert_checkpoint(written(tmp_path, state), tmp_path / "out", tokenizer=words, heads=HEADS)
    tokens = families.prompts(length=5)
    logits = gatelens.load(tmp_path / "out").hf(tokens).logits
    torch.testing.assert_close(logits, plain_forward(state, tokens)[..., : families.VOCAB], atol=1e-4, rtol=1e-4)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was-run"),)


def test_code_in_a_pickle_is_not_run(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, write in (
        ("torch.pth", torch.save),
        ("plain.pth", lambda data, path: path.write_bytes(pickle.dumps(data, protocol=2))),
    ):
        write({"model": checkpoint(), "more": Evil()}, tmp_path / name)
        with pytest.raises(GatelensError, match="They could run code, so they are not read"):
            convert_checkpoint(tmp_path / name, tmp_path / "out", tokenizer=words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.pth", "torch.pth"]


def _without(name: str) -> Any:
    return {key: value for key, value in checkpoint().items() if key != name}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "does not contain a state dict"),
        ({"model": {"a": 3}}, "a is a int"),
        ({"weight": torch.ones(2)}, "has no transformer"),
        (_without("transformer.h.1.ln_2.weight"), r"has no transformer\.h\.1\.ln_2\.weight"),
        ({**checkpoint(), "transformer.h.0.attn.gate": torch.ones(3)}, r"also has transformer\.h\.0\.attn\.gate"),
        ({k: v for k, v in checkpoint().items() if ".h.0." not in k}, "has no transformer.h.0"),
        ({**checkpoint(), "transformer.wte.weight": torch.ones(5)}, "two dimensions"),
        ({**checkpoint(), "transformer.h.0.mlp.c_proj.weight": torch.ones(3, 4)}, r"not \(4, 3\)"),
        ({**checkpoint(), "transformer.wte.weight": torch.ones(60, WIDTH)}, "vocabulary of 60, but the tokenizer"),
        ({"model": checkpoint(), "model_args": {"n_head": 7}}, "7 heads do not divide"),
        ({"model": checkpoint(), "model_args": {"n_head": -4}}, "-4 heads do not divide"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_files_that_are_not_such_a_checkpoint(data: Any, message: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match=message):
        convert_checkpoint(written(tmp_path, data), tmp_path / "out", tokenizer=words)
    assert [path.name for path in tmp_path.iterdir()] == ["final.pth"]


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04 truncated", b"\x80\x02."])
def test_damaged_files(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "final.pth").write_bytes(content)
    with pytest.raises(GatelensError, match=r"final\.pth"):
        convert_checkpoint(tmp_path / "final.pth", tmp_path / "out", tokenizer=words)


def test_on_the_command_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, {"model": checkpoint(), "model_args": {"n_head": HEADS}})
    asked = ["convert", str(path), "--tokenizer", words, "--bias", "0.0"]
    assert run(monkeypatch, *asked, "--out", "sparse") == 0
    assert "2 layers x 4 heads" in capsys.readouterr().out
    assert is_sparse(gatelens.load(tmp_path / "sparse").hf)
    for arguments, message in (
        ([*asked, "--out", "sparse"], "sparse exists already"),
        (["convert", "nowhere.pth", "--out", "new"], "there is no file nowhere.pth"),
        ([*asked, "--out", "new", "--activation", "relu"], "there is no activation 'relu'"),
        (["convert", str(path), "--tokenizer", "./nowhere", "--out", "new"], "nowhere"),
    ):
        assert run(monkeypatch, *arguments) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_adapter_becomes_full_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain transformers computes with them what gatelens computes with the adapter, and not what the base does."""
    monkeypatch.chdir(tmp_path)
    model = families.tiny(family)
    for part in (model.hf, model.tokenizer):
        part.save_pretrained("base")
    Path("words.txt").write_text("t5 t6 t7 " * 50)
    settings = SparsifySettings(
        steps=1, batch=2, length=8, warmup=0, cooldown=0.0, merge=False, gate="score", bias=0.2, learning_rate=0.1
    )
    sparsify(gatelens.load("base"), "words.txt", settings, out="adapter")
    assert run(monkeypatch, "convert", "adapter", "--out", "full") == 0
    assert "3 layers x 4 heads" in capsys.readouterr().out
    tokens = families.prompts()
    plain = AutoModelForCausalLM.from_pretrained("full")
    by_adapter = gatelens.load("adapter").hf(tokens).logits
    assert torch.equal(plain(tokens).logits, by_adapter)
    assert not torch.allclose(by_adapter, model.hf(tokens).logits, atol=0.01)
    assert torch.equal(gate_biases(plain), gate_biases(gatelens.load("full").hf))
    assert Path("full/README.md").read_text() == Path("adapter/README.md").read_text()
    for arguments, message in (
        (["adapter", "--out", "full"], "full exists already"),
        (["adapter", "--out", "new", "--bias", "0.0"], "give no option except --out"),
        (["base", "--out", "new"], "give the --bias of its gates"),
        (["base", "--out", "new", "--heads", "4"], "base is not a file: --tokenizer, --heads and --activation are for"),
        (["full", "--out", "new", "--bias", "0"], "full has gates already: give no bias"),
    ):
        assert run(monkeypatch, "convert", *arguments) == 2
        assert message in capsys.readouterr().err
    assert not Path("new").exists()

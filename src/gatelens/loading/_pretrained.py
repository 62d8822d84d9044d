"""Read a model folder or a hub id with transformers, after checking that gatelens can use it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gatelens.errors import GatelensError, shown
from gatelens.loading._explain import explained, only_pickled
from gatelens.loading.builtin import BUILT_IN
from gatelens.model.families import FAMILIES, family_of
from gatelens.model.first_token import adding_first_token
from gatelens.sparse.saved_gates import check_config


@dataclass(frozen=True)
class ReadOptions:
    """How to read weights: the options of `gatelens.load` that the readers need."""

    dtype: torch.dtype = torch.float32
    device_map: Any = None
    allow_pickle: bool = False


def read_pretrained(source: str, options: ReadOptions) -> tuple[Any, Any]:
    """Read the model and the tokenizer of a folder or a hub id.

    The config is checked before any weights are read or downloaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with explained(source), quiet():
        _ask_hub(source)
        _refuse_foreign_code(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _refuse_unfit(source, config)
        if Path(source).is_dir():
            _check_weights(Path(source), config, options.allow_pickle)
    with explained(source), quiet():
        hf, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=options.dtype,
            device_map=options.device_map,
            use_safetensors=None if options.allow_pickle else True,
            ignore_mismatched_sizes=True,  # `refuse_incomplete` raises a shorter error about them
            trust_remote_code=False,
            output_loading_info=True,
        )
    refuse_incomplete(source, info)
    return hf, read_tokenizer(source)


def saved_dtype(source: str) -> torch.dtype:
    """The dtype in which a folder or hub id has its weights; float32 for other sources."""
    from transformers import AutoConfig

    path = Path(source)
    if path.is_file() or (path.is_dir() and not (path / "config.json").exists()) or source in BUILT_IN:
        return torch.float32
    with explained(source), quiet():
        _ask_hub(source)
        dtype = AutoConfig.from_pretrained(source, trust_remote_code=False).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def read_tokenizer(source: str) -> Any:
    """Read the tokenizer of a folder or a hub id."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    with explained(source), quiet():
        _ask_hub(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            config = get_tokenizer_config(source)
        except ValueError as error:  # its files are missing, damaged, or need code that the repository brings
            raise _no_tokenizer(source) from error
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes an empty one if there are no files
        raise _no_tokenizer(source)
    # transformers does not follow this setting if there is a tokenizer.json.
    return adding_first_token(tokenizer, config.get("add_bos_token"))


def _ask_hub(source: str) -> None:
    """Ask the hub for a model that is not on this machine, so that a wrong name fails at once.

    transformers would repeat its requests for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if not Path(source).is_dir() and try_to_load_from_cache(source, "config.json") is None:
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=10)


def refuse_incomplete(source: str, info: dict[str, Any]) -> None:
    """Raise an error if transformers did not find all weights: it fills the others with random numbers.

    Arguments:
        source: what was read.
        info: what ``from_pretrained`` returns with ``output_loading_info=True``.
    """
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        others = f" and {len(absent) - 1} others" if len(absent) > 1 else ""
        raise GatelensError(
            f"the weights of {source} do not match its config: {absent[0]}{others} missing or of another shape. "
            "Copy or download the model again."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and reports. gatelens reports problems as errors of one sentence."""
    from transformers.utils import logging

    had_progress_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()


def _refuse_foreign_code(source: str) -> None:
    """Raise an error if the installed transformers does not have the code of this model's family."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    fields, _ = PreTrainedConfig.get_config_dict(source)
    if fields.get("model_type") in CONFIG_MAPPING:
        return
    if "AutoConfig" in fields.get("auto_map", {}):
        raise GatelensError(
            f"{source} needs its own code (remote code), which gatelens does not run: "
            "use a model whose family is part of transformers."
        )
    if "model_type" in fields:
        raise GatelensError(
            f"{source} is of the family '{fields['model_type']}', which the installed transformers does not know: "
            f"upgrade transformers, or use a model of a family that gatelens knows ({', '.join(sorted(FAMILIES))})."
        )


def _refuse_unfit(source: str, config: Any) -> None:
    """Raise an error if this is not a decoder-only causal LM of a known family."""
    if getattr(config, "is_encoder_decoder", False):
        raise GatelensError(
            f"{source} is an encoder-decoder model ({config.model_type}): gatelens works on decoder-only causal LMs "
            "such as gpt2 or meta-llama/Llama-3.2-1B."
        )
    architectures = getattr(config, "architectures", None) or []
    causal = [name for name in architectures if name.endswith(("ForCausalLM", "LMHeadModel"))]
    if config.model_type not in FAMILIES and not causal and architectures:
        raise GatelensError(
            f"{source} is not a causal LM but a {architectures[0]} ({config.model_type}): gatelens works on "
            "decoder-only causal LMs such as gpt2 or meta-llama/Llama-3.2-1B."
        )
    family_of(config)
    try:
        check_config(config)
    except GatelensError as error:
        raise GatelensError(f"{source} cannot be opened as a sparse model: {error}") from error


def _check_weights(folder: Path, config: Any, allow_pickle: bool) -> None:
    """Raise an error if the folder has no weights that may be read, if a file is damaged, or if sizes cannot fit."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not files and pickles and not allow_pickle:
        raise only_pickled(str(folder))
    if not files and not pickles:
        raise GatelensError(
            f"the folder {folder} has a config.json but no weights: put model.safetensors into it, "
            "or give another folder."
        )
    sizes: list[int] = []  # of all weights
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                sizes += [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise GatelensError(f"{path} is truncated or damaged ({error}): copy or download it again.") from error

    if sizes:
        _check_sizes(str(folder), config, sizes)


def _check_sizes(source: str, config: Any, sizes: list[int]) -> None:
    """Raise an error if the config asks for far more numbers than the weights have, before memory is taken for them."""
    text = config.get_text_config()
    heads = text.num_attention_heads * (getattr(text, "head_dim", None) or 1)
    asked = {"num_hidden_layers": text.num_hidden_layers, "num_attention_heads * head_dim": heads}
    limits = {"num_hidden_layers": len(sizes)}
    for name in ("hidden_size", "vocab_size", "intermediate_size"):
        asked[name] = getattr(text, name, None) or 0
    for name, size in asked.items():
        if not 0 <= size <= limits.get(name, max(sizes)):
            raise GatelensError(
                f"the weights of {source} do not match its config, whose {name} is {shown(size)}. Copy or download the "
                "model again."
            )


def _no_tokenizer(source: str) -> GatelensError:
    return GatelensError(
        f"{source} has no tokenizer that transformers can read: put the files that the tokenizer's save_pretrained "
        "writes (tokenizer.json, tokenizer_config.json) beside the weights."
    )

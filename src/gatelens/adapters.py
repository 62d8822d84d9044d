"""A sparse model as what training changed: LoRA matrices and gate biases, a few megabytes beside its dense base.

`adapter.safetensors` holds, for each module M with an adapter, `M.lora_A` (rank, in) and `M.lora_B` (out, rank), and
the biases `gate_bias` (layer, head). The merged weight of M is `W + scale * B A`. `adapter.json` says what the base is,
the scale, and how the adapter was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from gatelens.errors import GatelensError
from gatelens.gates.sparse import make_sparse

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

    about: at least the base, as `gatelens.load` opens it.
    """
    tensors = {"gate_bias": biases.to("cpu", dtype).contiguous()}
    for name, weight in trained.items():
        if found := re.fullmatch(r"base_model\.model\.(.*\.lora_[AB])\.default\.weight", name):
            tensors[found[1]] = weight.detach().to("cpu", dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / ABOUT).write_text(json.dumps({**about, "scale": scale}, indent=1) + "\n")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter without full weights."""
    return (folder / ABOUT).exists() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str:
    """What to load as the base of an adapter."""
    return str(json.loads((folder / ABOUT).read_text())["base"])


@torch.no_grad()
def apply_adapter(hf: Any, folder: Path) -> Any:
    """Merge an adapter into its base, in place, and make it sparse. Products are computed in float32."""
    tensors = load_file(folder / WEIGHTS)
    scale = float(json.loads((folder / ABOUT).read_text())["scale"])
    modules = dict(hf.named_modules())
    for key in [key for key in tensors if key.endswith(".lora_A")]:
        name = key.removesuffix(".lora_A")
        if name not in modules:
            raise GatelensError(
                f"the adapter in {folder} changes {name}, which {type(hf).__name__} does not have: it belongs to "
                f"another model, {base_of(folder)}."
            )
        _add(modules[name], scale * tensors[f"{name}.lora_B"].float() @ tensors[key].float())
    make_sparse(hf, tensors["gate_bias"].float())
    return hf


def _add(module: Any, change: Tensor) -> None:
    """Add (out, in) to a linear module's weight; GPT-2 stores its weights the other way round."""
    weight: Tensor = module.weight
    weight.add_((change.T if isinstance(module, Conv1D) else change).to(weight.device, weight.dtype))

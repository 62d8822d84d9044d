"""A sparse model stored as what training changed: LoRA matrices and gates, a few megabytes beside its dense base.

`adapter.safetensors` holds `M.lora_A` (rank, in) and `M.lora_B` (out, rank) for each module M with an adapter, and
`gate_bias` (layer, head) for the gates. Probability gates also have `gate_query` and `gate_key` (layer, head, width)
and `gate_rest` (layer, head, dim). The merged weight of M is `W + scale * B A`.

`adapter.json` names the base, the scale, what the gates see (`gate`; the score if it is missing), and how the adapter
was made. If it has the fingerprint of the base's weights, a base with other weights is refused. Weights with another
dtype than those that were hashed are not compared, because rounding changes all of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from gatelens.errors import GatelensError
from gatelens.model.model import hash_weights
from gatelens.runtime.files import replace_file, write_tensors
from gatelens.runtime.inputs import parse_json, usable_path
from gatelens.sparse._head_gates import initial_gates, is_gate_parameter
from gatelens.sparse.gated_attention import Gate
from gatelens.sparse.in_model import GateValues, make_sparse

WEIGHTS, ABOUT = "adapter.safetensors", "adapter.json"
GATE_TENSORS: dict[Gate, tuple[str, ...]] = {"score": ("bias",), "probability": ("bias", "query", "key", "rest")}


def write_adapter(
    folder: Path,
    trained: Mapping[str, Tensor],
    gates: GateValues,
    scale: float,
    description: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write an adapter.

    Arguments:
        trained: the trained matrices under the names that peft gives them. Parameters of gates are left out.
        description: goes into adapter.json; at least the base, as `gatelens.load` opens it. `base_weights` adds to it.
    """
    tensors = {f"gate_{name}": getattr(gates, name).to("cpu", dtype).contiguous() for name in GATE_TENSORS[gates.gate]}
    for name, weight in trained.items():
        if is_gate_parameter(name):
            continue
        stored_name = adapter_name(name)
        if stored_name is None:
            raise GatelensError(f"an adapter cannot hold {name}: train other projections, or all weights.")
        tensors[stored_name] = weight.detach().to("cpu", dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors)
    replace_file(folder / ABOUT, json.dumps({**description, "gate": gates.gate, "scale": scale}, indent=1) + "\n")


def adapter_name(name: str) -> str | None:
    """The name in an adapter of a matrix that peft calls `name`; None if it is not an adapter of a linear module."""
    match = re.fullmatch(r"base_model\.model\.(.*\.lora_[AB])\.default\.weight", name)
    return match[1] if match else None


def base_weights(hf: Any) -> dict[str, str]:
    """What tells the weights of a base from others: goes into `about`."""
    return {"fingerprint": hash_weights(hf), "dtype": str(hf.dtype)}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter without full weights."""
    return (folder / ABOUT).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str:
    """What `gatelens.load` opens as the base of an adapter."""
    base = str(_read_description(folder)["base"])
    if usable_path(base).resolve() == folder.resolve():
        raise _damaged(folder / ABOUT, "it names itself as its base")
    return base


@torch.no_grad()
def apply_adapter(hf: Any, folder: Path) -> Any:
    """Merge an adapter into its base, in place, and make it sparse. Products are computed in float32."""
    description, tensors = _read_description(folder), _read_tensors(folder)
    modules = dict(hf.named_modules())
    names = [key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")]
    gates = _read_gates(hf, folder, description, tensors)
    _check_fit(hf, folder, tensors, names)
    if (
        "fingerprint" in description
        and description.get("dtype") == str(hf.dtype)
        and description["fingerprint"] != hash_weights(hf)
    ):
        raise GatelensError(
            f"the adapter in {folder} was made for other weights than {description['base']} has now: use the base that "
            "it was made from."
        )
    for name in names:
        product = tensors[f"{name}.lora_B"].float() @ tensors[f"{name}.lora_A"].float()
        _add(modules[name], float(description["scale"]) * product)
    make_sparse(hf, **vars(gates))
    return hf


def read_adapter(hf: Any, folder: Path) -> tuple[dict[str, Tensor], GateValues, float]:
    """The matrices of an adapter by their names in the file, its gates, and its scale, if they fit a model."""
    description, tensors = _read_description(folder), _read_tensors(folder)
    gates = _read_gates(hf, folder, description, tensors)
    matrices = {name: tensor for name, tensor in tensors.items() if name.endswith((".lora_A", ".lora_B"))}
    return matrices, gates, float(description["scale"])


def _read_gates(hf: Any, folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GateValues:
    """The gates of an adapter; raise an error if they do not fit the model."""
    gate = description.get("gate", "score")
    if gate not in get_args(Gate):
        raise _damaged(folder / ABOUT, f"its gate is {gate!r}, not one of {', '.join(get_args(Gate))}")
    initial = initial_gates(gate, hf.config)
    values = {}
    for name in GATE_TENSORS[gate]:
        if f"gate_{name}" not in tensors:
            raise _damaged(folder / WEIGHTS, f"it has no gate_{name}")
        values[name] = tensors[f"gate_{name}"].float()
        expected = (hf.config.num_hidden_layers, *getattr(initial, name).shape)
        if values[name].shape != expected:
            actual = tuple(values[name].shape)
            raise _of_another_model(folder, f"has gates whose {name} is {actual} (layer, head, ...), not {expected}")
        if not values[name].isfinite().all():
            raise _damaged(folder / WEIGHTS, f"its gate_{name} has numbers that are not finite")
    return GateValues(gate, **values)


def _check_fit(hf: Any, folder: Path, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise an error if the matrices of an adapter do not fit the model."""
    modules = dict(hf.named_modules())
    for name in names:
        down, up = tensors[f"{name}.lora_A"], tensors.get(f"{name}.lora_B")
        if up is None or down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0]:
            raise _damaged(folder / WEIGHTS, f"it has no pair of matrices for {name}")
        if not hasattr(modules.get(name), "weight"):
            raise _of_another_model(folder, f"changes {name}, which {type(hf).__name__} does not have")
        change = (up.shape[0], down.shape[1])
        if tuple(modules[name].weight.shape) != (change[::-1] if isinstance(modules[name], Conv1D) else change):
            raise _of_another_model(folder, f"changes {name}, which has another shape in this model")


def _add(module: Any, change: Tensor) -> None:
    """Add (out, in) to a linear module's weight; GPT-2 stores its weights transposed."""
    weight: Tensor = module.weight
    weight.add_((change.T if isinstance(module, Conv1D) else change).to(weight.device, weight.dtype))


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        description = parse_json(path.read_text(encoding="utf-8"))
        if not math.isfinite(float(description["scale"])):
            raise ValueError(f"its scale is {description['scale']}")
        str(description["base"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise _damaged(path, error) from error
    return dict(description)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, reason: object) -> GatelensError:
    return GatelensError(f"{path} is incomplete or damaged ({reason}): copy the adapter again.")


def _of_another_model(folder: Path, reason: str) -> GatelensError:
    return GatelensError(f"the adapter in {folder} {reason}: it belongs to another model, {base_of(folder)}.")

"""The state of Adam as named tensors, so that a checkpoint is safetensors throughout.

A tensor is called `NUMBER.NAME`: the number of its parameter in the order of the optimizer, and the name that torch
gives it (`step`, `exp_avg`, `exp_avg_sq`). Learning rates are not part of it: they follow from the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gatelens.sparse.sparsify._sharding import gather, shard_like


def optimizer_tensors(optimizer: Any) -> dict[str, Tensor]:
    """The state of an optimizer as whole tensors. If weights are sharded, all processes must call this."""
    return {
        f"{number}.{name}": gather(tensor)
        for number, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }


def load_optimizer_tensors(optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer of the same parameters the state that `optimizer_tensors` returned."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        number, _, name = full_name.partition(".")
        parameter = parameters[int(number)]
        is_moment = tensor.shape == parameter.shape  # not the number of steps
        state.setdefault(int(number), {})[name] = shard_like(tensor, parameter) if is_moment else tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

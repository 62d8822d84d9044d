"""Tensors that are cut over processes (FSDP), whole again, and whole tensors cut: a checkpoint holds whole ones.

So a checkpoint is the same from one process or several. Run with two processes on CPUs, where accelerate has to be
told that it may use FSDP; never on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError


def is_spread(accelerator: Any) -> bool:
    """Whether accelerate cuts weights over processes. Only its FSDP of version 2 keeps them as they are named."""
    if not str(accelerator.distributed_type).endswith("FSDP"):
        return False
    if not getattr(accelerator, "is_fsdp2", False):
        raise GatelensError("sparsify cannot use FSDP of version 1: run `accelerate launch --fsdp_version 2`.")
    return True


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU, in every process. Where it is cut, all processes must ask for it."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).cpu().contiguous()


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of another one and, if that is cut over processes, cut in the same way."""
    tensor = tensor.to(like.device)
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # every process has all of it


def whole_state(optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer, as `state_dict` gives it, of whole tensors."""
    state = optimizer.state_dict()
    return {**state, "state": {i: {k: whole(v) for k, v in kept.items()} for i, kept in state["state"].items()}}


def cut_state(state: dict[str, Any], parameters: Iterable[Tensor]) -> dict[str, Any]:
    """What `whole_state` gave, for an optimizer of these parameters, in its order."""
    found = dict(enumerate(parameters))
    moments = {
        i: {k: cut(v, found[i]) if v.shape == found[i].shape else v for k, v in kept.items()}  # not the count of steps
        for i, kept in state["state"].items()
    }
    return {**state, "state": moments}

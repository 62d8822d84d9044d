"""Tensors that are sharded over processes (FSDP): gather them, and shard whole tensors. Checkpoints hold whole tensors.

So a checkpoint is the same whether one process wrote it or several. This was tested with two processes on CPUs, where
accelerate has to be told that it may use FSDP; it was not tested on GPUs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError


def is_sharded(accelerator: Any) -> bool:
    """Whether accelerate shards weights over processes. Only version 2 of FSDP keeps the names of the weights."""
    if not str(accelerator.distributed_type).endswith("FSDP"):
        return False
    if not getattr(accelerator, "is_fsdp2", False):
        raise GatelensError("sparsify cannot use FSDP of version 1: run `accelerate launch --fsdp_version 2`.")
    return True


def gather(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU, in every process. If it is sharded, all processes must call this."""
    tensor = tensor.detach()
    full_tensor = getattr(tensor, "full_tensor", None)
    return (tensor if full_tensor is None else full_tensor()).cpu().contiguous()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of another one and, if that one is sharded, sharded in the same way."""
    tensor = tensor.to(like.device)
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # every process has all of it

"""Which precision to compute in: matrix products in bfloat16 where that is faster, sums in at least float32."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gatelens.errors import GatelensWarning


def widen(x: Tensor) -> Tensor:
    """Convert to at least float32. Sums over prompts, positions and sources are never computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def use_bfloat16(device: torch.device, asked: bool) -> bool:
    """Whether to run matrix products in bfloat16.

    A CPU without bfloat16 instructions would emulate them, which is slower than float32. There this warns and returns
    False.

    Arguments:
        asked: whether the user asked for bfloat16.
    """
    if asked and device.type == "cpu" and not _cpu_has_bfloat16():
        warnings.warn(
            "this processor has no bfloat16 instructions: matrix products run in float32, which is faster here.",
            GatelensWarning,
            stacklevel=3,
        )
        return False
    return asked


def _cpu_has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

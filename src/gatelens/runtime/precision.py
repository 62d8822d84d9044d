"""Matrix products in bfloat16 (autocast): faster than float32, where the processor has instructions for them."""

from __future__ import annotations

import warnings

import torch

from gatelens.errors import GatelensWarning


def use_bfloat16(device: torch.device, asked: bool) -> bool:
    """Whether to run matrix products in bfloat16: if that is asked for, unless a CPU would have to imitate them.

    Float32, which is faster than that, is then used instead, with a warning.
    """
    if asked and device.type == "cpu" and not _cpu_has_bfloat16():
        warnings.warn(
            "this processor has no instructions for bfloat16: matrix products are float32, which is faster here.",
            GatelensWarning,
            stacklevel=3,
        )
        return False
    return asked


def _cpu_has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

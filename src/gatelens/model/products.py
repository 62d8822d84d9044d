"""Faster float32 matrix products with frozen weights, on processors that torch does not use well by itself.

torch computes float32 products on a CPU by MKL, which uses the AVX-512 instructions of Intel processors only. oneDNN is
part of torch too and uses them on all processors. On an AMD EPYC (Zen 5) with one thread it computes the products of
SmolLM2 at 270 GFLOPS instead of 120, in the same precision; sums are taken in another order, so the last bits differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@contextmanager
def fast_products(hf: nn.Module) -> Iterator[None]:
    """Inside the block, linear modules of a model with frozen float32 weights on the CPU run by oneDNN if it is faster.

    Activations have their usual gradients. Modules that another library has changed are left alone.

    Arguments:
        hf: the Hugging Face model. It is as before after the block, also after an exception.
    """
    changed = [module for module in hf.modules() if _can_change(module)] if onednn_is_faster() else []
    try:
        for module in changed:
            module.forward = partial(_forward, module)
        yield
    finally:
        for module in changed:
            module.__dict__.pop("forward", None)


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN's float32 products are faster than MKL's here: on AMD processors with AVX-512."""
    is_amd = "AuthenticAMD" in _processor() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_amd and torch.backends.mkldnn.is_available() and _product() is not None


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")[:1000]
    except OSError:
        return ""


@cache
def _product() -> Callable[..., Tensor] | None:
    """oneDNN's linear function, as torch's compiler calls it: product(x, weight, bias, "none", [], "")."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _can_change(module: nn.Module) -> bool:
    if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
        return False
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and not weight.requires_grad


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """What the module computes; its own forward for inputs in half precision or under autocast."""
    if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return type(module).forward(module, x)
    weight: Tensor = module.weight  # type: ignore[assignment]
    shaped = weight.T if isinstance(module, Conv1D) else weight  # GPT-2 stores the transposed weight
    # Rows are flattened out here, because a function of autograd may not return a view: OLMo changes it in place.
    rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), shaped, module.bias)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], len(shaped))


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias`` with a gradient for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight  # frozen, so that nothing can change it before the backward pass
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _multiply(gradients[0].contiguous(), ctx.weight.T, None), None, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = _product()
    assert product is not None
    return product(x, weight, bias, "none", [], "")

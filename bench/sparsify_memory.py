"""The memory that sparse post-training takes, before anything is run."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from gatelens.gates.runs import numbers_per_token
from gatelens.model import Model
from gatelens.runtime.precision import use_bfloat16
from gatelens.sparse.sparsify import SparsifySettings

_STATE = 4  # numbers for each trained weight: its value, its gradient and the two moments of Adam


def step_gb(model: Model, settings: SparsifySettings) -> float:
    """Peak memory of a step of one process, in GB, without the weights of the dense model.

    It is the sum of what is trained with its optimizer, of the activations that are kept for the backward pass, and of
    the logits: those of both models, and the gradient of one.
    """
    narrow = model.dtype.itemsize == 2 or use_bfloat16(model.device, settings.bf16)
    layers = 1 if settings.gradient_checkpointing else model.n_layers
    streams = model.n_layers * model.anatomy.width if settings.gradient_checkpointing else 0
    per_token = layers * numbers_per_token(model) + streams + 3 * int(model.hf.config.vocab_size)
    kept = settings.batch * settings.length * per_token
    return (4 * _STATE * trained_numbers(model, settings) + (2 if narrow else 4) * kept) / 1e9


def trained_numbers(model: Model, settings: SparsifySettings) -> int:
    """How many numbers are trained: adapters or all weights, and the gates."""
    of_gates = 0
    if settings.learn_bias and settings.hold != "open":
        of_head = 1
        if settings.gate == "probability":
            of_head += 2 * model.anatomy.width + (model.anatomy.head_dim if settings.rest else 0)
        of_gates = model.n_layers * model.n_heads * of_head
    if settings.weights == "full":
        return of_gates + model.n_parameters
    return of_gates + settings.rank * sum(sum(module.weight.shape) for module in _adapted(model, settings))


def _adapted(model: Model, settings: SparsifySettings) -> list[nn.Linear | Conv1D]:
    """The modules that get adapters."""
    if not settings.projections:
        return [module for block in model.anatomy.blocks for module in (*block.qkv, block.out)]
    linear = {
        name: module
        for name, module in model.hf.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not model.anatomy.unembed
    }
    if settings.projections == ("all-linear",):
        return list(linear.values())
    endings = tuple(f".{name}" for name in settings.projections)
    return [module for name, module in linear.items() if f".{name}".endswith(endings)]

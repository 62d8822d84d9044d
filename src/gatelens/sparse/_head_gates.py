"""The gates of one attention module: what they are made of, and the offsets that they take from the module's input.

In the score gauge a module has a bias for each head. In the probability gauge it also has a linear function of the
input for queries and one for keys, and a rest value for each head:

    gate_bias          (head,)         b
    gate_query.weight  (head, width)   u: the offset of query i is u . x_i
    gate_key.weight    (head, width)   w: the offset of key j is w . x_j
    gate_rest          (head, dim)     r

x is the input of the attention module, which its projections read. A hook that runs before the module computes the
offsets. A key-value cache stores the offsets of past keys as additional columns of the keys: whatever the cache does to
keys (grow, slide, reorder beams, crop, move to another device) it then does to their offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import Cache

from gatelens.sparse.gated_attention import Gate
from gatelens.sparse.saved_gates import NAME, saved_bias

PARTS = {torch.float16: 3, torch.bfloat16: 3}  # columns that hold one offset in float32 precision; else one column


class HeadOffset(nn.Module):
    """A linear function of the attention input for each head, computed in float32 or better."""

    def __init__(self, weight: Float[Tensor, "head width"], learned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=learned)

    def forward(self, x: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token head"]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(dtype), self.weight.to(x.device, dtype))


@dataclass(frozen=True, eq=False)
class ModuleGates:
    """What the gates of one attention module are made of; the score gauge has a bias only."""

    gate: Gate
    bias: Float[Tensor, " head"]
    query: Float[Tensor, "head width"] | None = None
    key: Float[Tensor, "head width"] | None = None
    rest: Float[Tensor, "head dim"] | None = None


def is_attention(module: nn.Module) -> bool:
    """Whether a module is a self-attention module of a decoder."""
    return hasattr(module, "layer_idx") and bool(getattr(module, "is_causal", False))


def is_gate_parameter(name: str) -> bool:
    """Whether a parameter with this name belongs to the gates."""
    return name.endswith((".gate_bias", ".gate_query.weight", ".gate_key.weight", ".gate_rest"))


def gate_of(module: Any) -> Gate:
    """The gauge of an attention module."""
    return "probability" if hasattr(module, "gate_query") else "score"


def has_gates_on(module: Any) -> bool:
    """Whether an attention module uses its gates; not inside `dense_attention`."""
    return str(module.config._attn_implementation).startswith(NAME)


def attach_gates(module: Any, gates: ModuleGates, learned: bool) -> None:
    """Give an attention module these gates, in place of those that it has.

    Gates of the probability gauge are always part of the state dict. A bias of the score gauge is part of it only if it
    is learned: otherwise the model's config holds it, as in models that earlier versions saved.
    """
    detach_gates(module)
    device = next(module.parameters()).device
    if gates.gate == "score":
        bias = gates.bias.to(device, copy=True)
        if learned:
            module.gate_bias = nn.Parameter(bias)
        else:
            module.register_buffer("gate_bias", bias, persistent=False)
        return
    for name in ("bias", "rest"):
        values = getattr(gates, name).to(device, copy=True)
        setattr(module, f"gate_{name}", nn.Parameter(values, requires_grad=learned))
    for name in ("query", "key"):
        setattr(module, f"gate_{name}", HeadOffset(getattr(gates, name).to(device, copy=True), learned))
    if _compute_offsets not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_compute_offsets, with_kwargs=True)


def detach_gates(module: Any) -> None:
    """Remove the gates of an attention module, if it has any. The hook stays and does nothing without them."""
    for name in ("gate_bias", "gate_rest", "gate_query", "gate_key"):
        if hasattr(module, name):
            delattr(module, name)


def gates_of(module: Any) -> ModuleGates:
    """The gates of an attention module. Biases of a model that plain transformers opened are still in its config."""
    if not hasattr(module, "gate_bias"):
        attach_gates(module, ModuleGates("score", saved_bias(module.config)[module.layer_idx]), learned=False)
        module.config.attn_implementation = NAME  # for the next save, see save_sparse
    if gate_of(module) == "score":
        return ModuleGates("score", module.gate_bias)
    return ModuleGates(
        "probability", module.gate_bias, module.gate_query.weight, module.gate_key.weight, module.gate_rest
    )


def take_offsets(
    module: Any,
) -> tuple[Float[Tensor, "batch head query"], Float[Tensor, "batch head key"]] | tuple[None, None]:
    """The offsets of the queries and of all keys that the hook computed for the forward pass that is under way."""
    offsets: tuple[Tensor, Tensor] | None = module.__dict__.pop("gate_offsets", None)
    return (None, None) if offsets is None else offsets


def _compute_offsets(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the offsets from the input of an attention module, and let its cache keep those of the keys."""
    if not has_gates_on(module) or not hasattr(module, "gate_query"):
        return None
    x = args[0] if args else kwargs["hidden_states"]
    module.gate_offsets = (module.gate_query(x).mT, module.gate_key(x).mT)
    args = tuple(_OffsetCache(value, module) if isinstance(value, Cache) else value for value in args)
    kwargs = {
        name: _OffsetCache(value, module) if isinstance(value, Cache) else value for name, value in kwargs.items()
    }
    return args, kwargs


class _OffsetCache:
    """A key-value cache that also stores the key offsets of one attention module, while the module runs."""

    def __init__(self, cache: Cache, module: Any) -> None:
        self._cache, self._module = cache, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, as transformers asks, and return all of them."""
        of_queries, of_keys = self._module.gate_offsets
        kv_heads, dim = keys.shape[1], keys.shape[-1]
        columns = torch.cat([keys, _as_columns(of_keys.to(keys.device), kv_heads, keys.dtype)], -1)
        all_keys, all_values = self._cache.update(columns, values, *args, **kwargs)
        self._module.gate_offsets = (of_queries, _from_columns(all_keys[..., dim:], of_keys.shape[1] // kv_heads))
        return all_keys[..., :dim], all_values


def _as_columns(
    offsets: Float[Tensor, "batch head key"], kv_heads: int, dtype: torch.dtype
) -> Float[Tensor, "batch kv_head key column"]:
    """Offsets as columns of the keys, for each head of a KV head; in half precision as a sum of several numbers."""
    left, parts = offsets, []
    for _ in range(PARTS.get(dtype, 1)):
        parts.append(left.to(dtype))
        left = left - parts[-1].to(left.dtype)
    return torch.stack(parts, -1).unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3)


def _from_columns(
    columns: Float[Tensor, "batch kv_head key column"], group: int
) -> Float[Tensor, "batch head all_keys"]:
    """The inverse of `_as_columns`."""
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    return wide.unflatten(-1, (group, -1)).sum(-1).transpose(2, 3).flatten(1, 2)


def _attach_on_construction(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Attach gates to an attention module as soon as a model is built whose config says that it has them.

    Plain `from_pretrained` builds the model first and then loads its weights, so that the weights of the gates find
    their place. transformers has no hook of its own for this.
    """
    config: Any = getattr(module, "config", None)
    saved = getattr(config, NAME, None)
    if module is None or not isinstance(saved, dict) or saved.get("gate", "score") == "score":
        return
    if is_attention(module) and not hasattr(module, "gate_query"):
        gates = initial_gates("probability", config)
        attach_gates(module, gates, learned=False)


def initial_gates(gate: Gate, config: Any, bias: float = 0.0) -> ModuleGates:
    """Gates of one module of a model with this config: a bias, offsets and rest values of 0."""
    heads, width = config.num_attention_heads, config.hidden_size
    values = torch.full((heads,), bias)
    if gate == "score":
        return ModuleGates(gate, values)
    dim = getattr(config, "head_dim", None) or width // heads
    return ModuleGates(gate, values, torch.zeros(heads, width), torch.zeros(heads, width), torch.zeros(heads, dim))


register_module_module_registration_hook(_attach_on_construction)

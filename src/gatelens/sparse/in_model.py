"""Gated attention inside a Hugging Face model, through transformers' own attention interface.

No model code is rewritten: importing this module registers the operator under the name "gatelens", and `make_sparse`
tells a model to use it, as one would tell it to use "sdpa". In training mode gates are sampled, in evaluation mode they
are steps. The model's attention dropout is not applied: the noise of the gates takes its place.

A saved sparse model says in its config which operator it uses (`attn_implementation`) and what its gates see
(`gatelens`), so that plain `from_pretrained` opens it once this package is imported. Biases of the score gauge are in
the config too, one for all heads or (layer, head); everything of the probability gauge is among the weights.
docs/reference/sparse-models.md describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gatelens.errors import GatelensError
from gatelens.sparse._head_gates import (
    NAME,
    HeadOffset,
    ModuleGates,
    attach_gates,
    detach_gates,
    gate_of,
    has_gates_on,
    initial_gates,
    take_offsets,
)
from gatelens.sparse.gated_attention import Gate, broadcast, gated_attention
from gatelens.sparse.recording import OpenRecord, attention_modules, generators
from gatelens.sparse.recording import record_open as record_open

BIAS: dict[Gate, float] = {"score": 3.0, "probability": 6.0}
"""The biases that gates start with: most edges are open."""


@dataclass(frozen=True, eq=False)
class GateValues:
    """What the gates of all heads of a model are made of; the score gauge has biases only.

    `make_sparse(hf, **vars(values))` gives a model these gates.
    """

    gate: Gate
    bias: Float[Tensor, "layer head"]
    query: Float[Tensor, "layer head width"] | None = None
    key: Float[Tensor, "layer head width"] | None = None
    rest: Float[Tensor, "layer head dim"] | None = None


def make_sparse(
    hf: Any,
    bias: float | Tensor | None = None,
    learned: bool = False,
    *,
    gate: Gate | None = None,
    query: Float[Tensor, "layer head width"] | None = None,
    key: Float[Tensor, "layer head width"] | None = None,
    rest: Float[Tensor, "layer head dim"] | None = None,
) -> None:
    """Switch a loaded Hugging Face causal LM to gated attention, in place.

    What is not given stays as it is in a model that has gates of this kind already, or was saved with them. Otherwise
    the bias is 3 in the score gauge and 6 in the probability gauge, and offsets and rest values are 0.

    Arguments:
        bias: one for all heads, or (layer, head).
        learned: make the values of the gates parameters that require gradients. Save such a model with `save_sparse`.
        gate: what the gates see; by default what the model has, or its scores.
        query, key: u and w, from which the offsets of queries and keys are computed; probability gauge only.
        rest: the rest value of each head; probability gauge only.

    Example:
        make_sparse(hf, bias=6.2, gate="probability")  # closes edges with an attention weight below 0.002
    """
    modules, dense = attention_modules(hf), _dense_implementation(hf)
    gates = _chosen_gates(hf, modules, gate, {"bias": bias, "query": query, "key": key, "rest": rest})
    hf.set_attn_implementation(NAME)
    if not is_sparse(hf) or not modules:
        raise GatelensError(f"{type(hf).__name__} has no attention that transformers can exchange.")
    for module, values in zip(modules, gates, strict=True):
        attach_gates(module, values, learned)
    # A learned bias of the score gauge changes after this: only `save_sparse` writes it, so that no old one is saved.
    in_config = gates[0].gate == "score" and not learned
    saved = {"bias": [values.bias.tolist() for values in gates] if in_config else None, "dense": dense}
    hf.config.gatelens = saved if gates[0].gate == "score" else {"gate": gates[0].gate, "dense": dense}
    hf.config.attn_implementation = NAME


def make_dense(hf: Any) -> None:
    """Undo `make_sparse`: the model attends as it did before, and its config has no gates."""
    hf.set_attn_implementation(_dense_implementation(hf))
    for module in attention_modules(hf):
        detach_gates(module)
    for name in (NAME, "attn_implementation"):
        if hasattr(hf.config, name):
            delattr(hf.config, name)


def is_sparse(hf: Any) -> bool:
    """Whether the model attends through gates."""
    return bool(hf.config._attn_implementation == NAME)


def gate_values(hf: Any) -> GateValues:
    """What the gates of a sparse model are made of now, in float32, without gradient, on the CPU."""
    gates = [_gates_of(module) for module in attention_modules(hf)]
    stacked = {
        name: torch.stack([getattr(each, name).detach().float().cpu() for each in gates])
        for name in ("bias", "query", "key", "rest")
        if getattr(gates[0], name) is not None
    }
    return GateValues(gates[0].gate, **stacked)


def gate_biases(hf: Any) -> Float[Tensor, "layer head"]:
    """The biases of a sparse model as they are now, without gradient, on the CPU."""
    return gate_values(hf).bias


@contextmanager
def dense_attention(hf: Any) -> Iterator[None]:
    """Inside, a sparse model attends to everything, with the attention implementation that it was made from."""
    hf.set_attn_implementation(_dense_implementation(hf))
    try:
        yield
    finally:
        hf.set_attn_implementation(NAME)


def save_sparse(hf: Any, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write a sparse model as a folder, with its gates as they are now.

    Arguments:
        state_dict: the gathered weights of a model that is sharded over processes.
    """
    weights = dict(hf.state_dict() if state_dict is None else state_dict)
    before = hf.config.gatelens
    if before.get("gate", "score") == "score":
        learned = [weights.pop(name).float().tolist() for name in list(weights) if name.endswith(".gate_bias")]
        hf.config.gatelens = {**before, "bias": learned or before["bias"]}
    hf.config.attn_implementation = NAME  # transformers removes it from a config that it reads
    try:
        hf.save_pretrained(folder, state_dict=weights)
    finally:
        hf.config.gatelens = before


@dataclass(frozen=True, eq=False)
class EdgeGates:
    """The gates of one attention module in one forward pass, for code that computes attention itself."""

    edges: Bool[Tensor, "batch head query key"]  # visible and open
    rest: Float[Tensor, "head dim"] | None  # z_i = rest + sum over open j of p_ij (v_j - rest); None is 0


def edge_gates(
    module: Any, scores: Float[Tensor, "batch head query key"], visible: Bool[Tensor, "batch _ query key"]
) -> EdgeGates:
    """Say which edges of a sparse model's attention module are open, in a forward pass that is under way.

    Call it once from an attention function whose registered name starts with "gatelens": offsets are only computed for
    these.

    Arguments:
        scores: scaled and soft-capped, not masked.
        visible: True for a visible pair.
    """
    gates = _gates_of(module)
    of_queries, of_keys = take_offsets(module)
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if gates.gate == "probability":
        logits = logits.masked_fill(~visible, -torch.inf).log_softmax(-1)
    logits = logits + gates.bias.to(logits)[:, None, None]
    if of_queries is not None and of_keys is not None:
        logits = logits + of_queries.to(logits)[..., :, None] + of_keys.to(logits)[..., None, :]
    return EdgeGates(visible & (logits > 0), None if gates.rest is None else gates.rest.to(scores))


def offset_modules(module: Any) -> tuple[HeadOffset, HeadOffset] | None:
    """The modules that compute the offsets of queries and of keys, if this attention module calls them now.

    Each reads the input of the attention module, (batch, token, width), and returns (batch, token, head). They are
    called before the projections, in this order. Code that gives each head an input of its own can replace their
    outputs, as it replaces those of the projections. Score gates have no offsets, nor has a model without gates.
    """
    in_use = gate_of(module) == "probability" and has_gates_on(module)
    return (module.gate_query, module.gate_key) if in_use else None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention module; returns (batch, query, head, dim)."""
    for unknown in ("position_bias", "s_aux"):
        if kwargs.get(unknown) is not None:
            raise GatelensError(f"{type(module).__name__} needs `{unknown}`, which gated attention does not have.")
    gates = _gates_of(module)
    of_queries, of_keys = take_offsets(module)
    causal = attention_mask is None and (module.is_causal if is_causal is None else is_causal)
    if causal and query.shape[2] > 1:
        # Without a mask the queries are the first tokens of the cache: the rest of a static one is still empty.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        of_keys = None if of_keys is None else of_keys[..., : query.shape[2]]
    record: OpenRecord | None = getattr(module, "gate_record", None)
    attention = gated_attention(
        query,
        key,
        value,
        gates.bias,
        causal=causal,
        sample=module.training,
        gate=gates.gate,
        query_offset=of_queries,
        key_offset=of_keys,
        rest=gates.rest,
        temperature=getattr(module, "gate_temperature", 1.0),
        scale=scaling,
        softcap=softcap,
        mask=attention_mask,
        generator=generators(module) if module.training else None,
        straight_through=getattr(module, "gate_straight_through", False),
        return_open=record is not None and record.wants_edges,
    )
    if record is not None:
        record.add(module.layer_idx, attention)
    return attention[0].transpose(1, 2).contiguous(), None


def _mask(
    q_length: int, q_offset: int | Tensor = 0, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The mask of sdpa, in which padded queries see nothing either: otherwise their edges would be counted."""
    mask: Tensor | None = sdpa_mask(q_length=q_length, q_offset=q_offset, attention_mask=attention_mask, **kwargs)
    if mask is None or attention_mask is None:
        return mask
    queries = torch.arange(q_length, device=attention_mask.device) + q_offset
    return mask & attention_mask[:, queries].bool()[:, None, :, None]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _chosen_gates(
    hf: Any, modules: list[Any], gate: Gate | None, given: Mapping[str, float | Tensor | None]
) -> list[ModuleGates]:
    """The gates of each module: what is given, else what the model has, else initial values."""
    has_gates = hasattr(hf.config, NAME) and modules
    now = [_gates_of(module) for module in modules] if has_gates else []
    kind: Gate = gate or (now[0].gate if now else "score")
    if not now or now[0].gate != kind:
        now = [initial_gates(kind, hf.config, BIAS[kind]) for _ in modules]
    chosen: dict[str, list[Tensor | None]] = {}
    for name, values in given.items():
        present = [getattr(each, name) for each in now]
        if values is not None and now:
            if present[0] is None:
                raise GatelensError(
                    f"gates that see scores have no {name}: choose gate='probability', or leave it out."
                )
            shape = (len(modules), *present[0].shape)
            present = list(broadcast(name, torch.as_tensor(values, dtype=torch.float32), shape))
        chosen[name] = [None if each is None else each.detach().float() for each in present]
    layers = zip(*chosen.values(), strict=True)
    return [ModuleGates(kind, **dict(zip(chosen, layer, strict=True))) for layer in layers]


def _gates_of(module: Any) -> ModuleGates:
    """The gates of an attention module. Biases of a model that plain transformers opened are still in its config."""
    if not hasattr(module, "gate_bias"):
        attach_gates(module, ModuleGates("score", saved_bias(module.config)[module.layer_idx]), learned=False)
        module.config.attn_implementation = NAME  # for the next save, see save_sparse
    if gate_of(module) == "score":
        return ModuleGates("score", module.gate_bias)
    return ModuleGates(
        "probability", module.gate_bias, module.gate_query.weight, module.gate_key.weight, module.gate_rest
    )


def check_config(config: Any) -> None:
    """Raise an error if what a config says about gates has another form than `save_sparse` writes."""
    saved = getattr(config, NAME, None)
    if saved is None:
        if getattr(config, "_attn_implementation", None) == NAME:
            raise GatelensError(f'its config asks for gated attention, but it has no "{NAME}" with the gates.')
        return
    if not isinstance(saved, dict) or saved.get("gate", "score") not in get_args(Gate):
        raise GatelensError(f'"{NAME}" in its config is {_short(saved)}: it must be an object, such as {{"bias": 0}}.')
    if not isinstance(saved.get("dense"), str | None):
        raise GatelensError(f'"dense" of "{NAME}" in its config is {_short(saved["dense"])}: it must be a string.')
    if saved.get("gate", "score") == "score":
        saved_bias(config)


def saved_bias(config: Any) -> Float[Tensor, "layer head"]:
    """The biases of score gates that a config holds: one number for all heads, or a list of numbers for each layer."""
    saved = getattr(config, NAME, {}).get("bias")
    if saved is None:
        raise GatelensError("this model has no gate biases: set them with make_sparse, and save with save_sparse.")
    shape = (config.num_hidden_layers, config.num_attention_heads)
    try:
        bias = torch.tensor(saved, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        bias = torch.empty(0)
    if bias.shape not in ((), shape) or not bias.isfinite().all():
        raise GatelensError(
            f'"bias" of "{NAME}" in its config is {_short(saved)}: it must be a number, or a list of {shape[1]} '
            f"numbers for each of {shape[0]} layers."
        )
    return bias.expand(shape)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _dense_implementation(hf: Any) -> str:
    """The attention implementation that a model has without gates."""
    if not is_sparse(hf):
        return str(hf.config._attn_implementation)
    return str(getattr(hf.config, NAME, {}).get("dense") or hf.get_correct_attn_implementation(None))

"""Gated attention inside a Hugging Face model, through transformers' own attention interface.

No model code is rewritten: `make_sparse` tells a model to use the operator that `attention_interface` registers under
the name "gatelens", as one would tell it to use "sdpa". In training mode gates are sampled, in evaluation mode they
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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.sparse import attention_interface as attention_interface  # for its registration
from gatelens.sparse._head_gates import ModuleGates, attach_gates, detach_gates, gates_of, initial_gates
from gatelens.sparse.gated_attention import Gate, broadcast
from gatelens.sparse.recording import attention_modules
from gatelens.sparse.saved_gates import NAME

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
    gates = [gates_of(module) for module in attention_modules(hf)]
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


def _chosen_gates(
    hf: Any, modules: list[Any], gate: Gate | None, given: Mapping[str, float | Tensor | None]
) -> list[ModuleGates]:
    """The gates of each module: what is given, else what the model has, else initial values."""
    has_gates = hasattr(hf.config, NAME) and modules
    now = [gates_of(module) for module in modules] if has_gates else []
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


def _dense_implementation(hf: Any) -> str:
    """The attention implementation that a model has without gates."""
    if not is_sparse(hf):
        return str(hf.config._attn_implementation)
    return str(getattr(hf.config, NAME, {}).get("dense") or hf.get_correct_attn_implementation(None))

"""Gated attention inside a Hugging Face model, through transformers' own attention interface.

No model code is rewritten: importing this module registers the operator under the name "gatelens", and `make_sparse`
tells a model to use it, as one would tell it to use "sdpa". In training mode gates are drawn, in evaluation mode they
are steps. The model's attention dropout is not applied: the noise of the gates takes its place.

A saved sparse model needs nothing but its config: `attn_implementation` names the operator and `gatelens` holds the
bias of every head, so that plain `from_pretrained` opens it after `import gatelens.sparse`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gatelens.errors import GatelensError
from gatelens.sparse.gated_attention import GatedAttention, broadcast, gated_attention

NAME = "gatelens"
BIAS = 3.0  # gates start open


def make_sparse(hf: Any, bias: float | Tensor | None = None, learned: bool = False) -> None:
    """Switch a loaded Hugging Face causal LM to gated attention, in place.

    bias: one for all heads, or (layer, head); by default what the model has or was saved with, else 3.
    learned: each attention module gets its (head,) biases as a parameter `gate_bias`, part of the state dict. Save such
    a model with `save_sparse`.
    """
    modules = _attention_modules(hf)
    dense = _dense_implementation(hf)
    if bias is None:
        bias = gate_biases(hf) if hasattr(hf.config, NAME) else BIAS
    shape = (len(modules), hf.config.num_attention_heads)
    biases = broadcast("bias", torch.as_tensor(bias, dtype=torch.float32), shape)
    hf.set_attn_implementation(NAME)
    if not is_sparse(hf) or not modules:
        raise GatelensError(f"{type(hf).__name__} has no attention that transformers can exchange.")
    for module, values in zip(modules, biases, strict=True):
        _set_bias(module, values, learned)
    # A learned bias changes after this: it is written by `save_sparse` only, so that no stale one is ever saved.
    hf.config.gatelens = {"bias": None if learned else biases.tolist(), "dense": dense}
    hf.config.attn_implementation = NAME


def make_dense(hf: Any) -> None:
    """Undo `make_sparse`: the model attends as it did before, and its config forgets the gates."""
    hf.set_attn_implementation(_dense_implementation(hf))
    for module in _attention_modules(hf):
        if hasattr(module, "gate_bias"):
            del module.gate_bias
    for name in (NAME, "attn_implementation"):
        if hasattr(hf.config, name):
            delattr(hf.config, name)


def is_sparse(hf: Any) -> bool:
    """Whether the model attends through gates."""
    return bool(hf.config._attn_implementation == NAME)


def gate_biases(hf: Any) -> Tensor:
    """(layer, head): the biases of a sparse model as they are now, without gradient, on the CPU."""
    return torch.stack([bias_of(module).detach().float().cpu() for module in _attention_modules(hf)])


@contextmanager
def dense_attention(hf: Any) -> Iterator[None]:
    """Inside, a sparse model attends to everything, with the attention it was made from."""
    hf.set_attn_implementation(_dense_implementation(hf))
    try:
        yield
    finally:
        hf.set_attn_implementation(NAME)


def save_sparse(hf: Any, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write a sparse model as a folder, with its biases as they are now.

    state_dict: the gathered weights of a model that is spread over processes.
    """
    weights = dict(hf.state_dict() if state_dict is None else state_dict)
    learned = [weights.pop(name).float().tolist() for name in list(weights) if name.endswith(".gate_bias")]
    before = hf.config.gatelens
    hf.config.gatelens = {**before, "bias": learned or before["bias"]}
    hf.config.attn_implementation = NAME  # transformers takes it out of a config that it reads
    try:
        hf.save_pretrained(folder, state_dict=weights)
    finally:
        hf.config.gatelens = before


class OpenRecord:
    """What the gates of each layer did in the last forward pass, stacked over layers."""

    def __init__(self, edges: bool) -> None:
        self.wants_edges = edges
        self._layers: dict[int, tuple[Tensor, Tensor, Tensor, Tensor | None]] = {}

    def add(self, layer: int, attention: GatedAttention) -> None:
        _, expected, edges = attention
        self._layers[layer] = expected, attention.open_share, attention.pairs, edges

    @property
    def expected(self) -> Tensor:
        """(layer, batch, head): expected share of open edges, with gradient."""
        return self._stack(0)

    @property
    def open_share(self) -> Tensor:
        """(layer, batch, head): share of visible pairs with s + b > 0, the reported sparsity."""
        return self._stack(1)

    @property
    def pairs(self) -> Tensor:
        """(layer, batch, head): number of visible pairs; what to weigh the shares with in a mean over rows."""
        return self._stack(2)

    @property
    def edges(self) -> Tensor:
        """Boolean (layer, batch, head, query, key): the open gates; kept with `record_open(hf, edges=True)`."""
        return self._stack(3)

    def _stack(self, index: int) -> Tensor:
        kept: list[Any] = [layer[index] for _, layer in sorted(self._layers.items())]
        if not kept or kept[0] is None:
            raise GatelensError("nothing was recorded: run a sparse model in record_open, with edges=True for edges.")
        return torch.stack([x.to(kept[0].device) for x in kept])


@contextmanager
def record_open(hf: Any, edges: bool = False) -> Iterator[OpenRecord]:
    """Inside, every forward pass of a sparse model leaves its shares of open edges in the record.

    edges: keep the gates themselves too, in memory quadratic in the sequence length.
    """
    record = OpenRecord(edges)
    modules = _attention_modules(hf)
    for module in modules:
        module.gate_record = record
    try:
        yield record
    finally:
        for module in modules:
            del module.gate_record


@contextmanager
def row_noise(hf: Any, seeds: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside, the gates of each row of a batch are drawn from the row's own seed, a few integers from 0 up.

    So they depend neither on what else is in the batch, nor on the device, nor on what was drawn before.
    """
    modules = _attention_modules(hf)
    for module in modules:
        module.gate_seeds = seeds
    try:
        yield
    finally:
        for module in modules:
            del module.gate_seeds


def _generators(module: Any) -> list[torch.Generator] | None:
    """One for each row, under `row_noise`."""
    seeds = getattr(module, "gate_seeds", None)
    if seeds is None:
        return None
    mixed = [int(np.random.SeedSequence([*seed, module.layer_idx]).generate_state(1)[0]) for seed in seeds]
    return [torch.Generator().manual_seed(seed) for seed in mixed]


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
    causal = attention_mask is None and (module.is_causal if is_causal is None else is_causal)
    if causal and query.shape[2] > 1:
        # Without a mask the queries are the first tokens of the cache: the rest of a static one is still empty.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    record: OpenRecord | None = getattr(module, "gate_record", None)
    attention = gated_attention(
        query,
        key,
        value,
        bias_of(module),
        causal=causal,
        sample=module.training,
        scale=scaling,
        softcap=softcap,
        mask=attention_mask,
        generator=_generators(module) if module.training else None,
        return_open=record is not None and record.wants_edges,
    )
    if record is not None:
        record.add(module.layer_idx, attention)
    return attention[0].transpose(1, 2).contiguous(), None


def _mask(q_length: int, q_offset: int = 0, attention_mask: Tensor | None = None, **rest: Any) -> Tensor | None:
    """Sdpa's mask, in which padded queries see nothing either: their edges would count as open or closed."""
    mask: Tensor | None = sdpa_mask(q_length=q_length, q_offset=q_offset, attention_mask=attention_mask, **rest)
    if mask is None or attention_mask is None:
        return mask
    queries = torch.arange(q_length, device=attention_mask.device) + q_offset
    return mask & attention_mask[:, queries].bool()[:, None, :, None]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _attention_modules(hf: Any) -> list[Any]:
    """The self-attention modules of a decoder, by layer."""
    found = [m for m in hf.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", False)]
    return sorted(found, key=lambda module: module.layer_idx)


def _dense_implementation(hf: Any) -> str:
    """The attention that a model has without gates."""
    if not is_sparse(hf):
        return str(hf.config._attn_implementation)
    return str(getattr(hf.config, NAME, {}).get("dense") or hf.get_correct_attn_implementation(None))


def bias_of(module: Any) -> Tensor:
    """The (head,) biases of an attention module; those of a model opened by plain transformers are in its config."""
    if not hasattr(module, "gate_bias"):
        saved = getattr(module.config, NAME, {}).get("bias")
        if saved is None:
            raise GatelensError("no gate biases in this model: set them with make_sparse, save them with save_sparse.")
        _set_bias(module, torch.tensor(saved[module.layer_idx]), learned=False)
        module.config.attn_implementation = NAME  # for the next save, see save_sparse
    bias: Tensor = module.gate_bias
    return bias


def _set_bias(module: nn.Module, values: Tensor, learned: bool) -> None:
    if hasattr(module, "gate_bias"):
        del module.gate_bias
    values = values.to(next(module.parameters()).device, copy=True)
    if learned:
        module.gate_bias = nn.Parameter(values)
    else:
        module.register_buffer("gate_bias", values, persistent=False)

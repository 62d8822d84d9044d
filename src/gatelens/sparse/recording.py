"""What the gates of a sparse model do while it runs: record open edges, seed the noise, differentiate through gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.sparse._head_gates import is_attention
from gatelens.sparse.gated_attention import GatedAttention


def attention_modules(hf: Any) -> list[Any]:
    """The self-attention modules of a decoder, by layer."""
    return sorted((module for module in hf.modules() if is_attention(module)), key=lambda module: module.layer_idx)


class OpenRecord:
    """What the gates of each layer did in the last forward pass, stacked over layers.

    Keys are counted as open where the gate logit is positive, whether or not gates are sampled.
    """

    def __init__(self, edges: bool, first: bool = False) -> None:
        self._keeps_edges, self._keeps_first = edges, first
        self._layers: dict[int, dict[str, Tensor | None]] = {}

    def add(self, layer: int, attention: GatedAttention) -> None:
        _, expected, edges = attention
        first = edges[..., 0] if edges is not None and self._keeps_first else None
        kept = edges if self._keeps_edges else None
        self._layers[layer] = {"expected": expected, "edges": kept, "first": first, **vars(attention)}

    @property
    def wants_edges(self) -> bool:
        """Whether attention modules have to hand over the gates themselves."""
        return self._keeps_edges or self._keeps_first

    @property
    def expected(self) -> Float[Tensor, "layer batch head"]:
        """Expected share of open edges, with gradient."""
        return self._stack("expected")

    @property
    def expected_keys(self) -> Float[Tensor, "layer batch head query"]:
        """Expected number of open keys of each query, with gradient."""
        return self._stack("expected_keys")

    @property
    def open_share(self) -> Float[Tensor, "layer batch head"]:
        """Share of visible pairs that are open."""
        return self._stack("open_share")

    @property
    def open_keys(self) -> Int64[Tensor, "layer batch head query"]:
        """Number of open keys of each query."""
        return self._stack("open_keys")

    @property
    def visible_keys(self) -> Int64[Tensor, "layer batch head query"]:
        """Number of keys that each query sees; 0 for padding."""
        return self._stack("visible_keys")

    @property
    def pairs(self) -> Int64[Tensor, "layer batch head"]:
        """Number of visible pairs: the weight of a share in a mean over sequences."""
        return self._stack("pairs")

    @property
    def edges(self) -> Bool[Tensor, "layer batch head query key"]:
        """The open gates; recorded with `record_open(hf, edges=True)`."""
        return self._stack("edges")

    @property
    def first(self) -> Bool[Tensor, "layer batch head query"]:
        """Whether the edge of each query to the first key is open; recorded with `record_open(hf, first=True)`."""
        return self._stack("first")

    def _stack(self, name: str) -> Tensor:
        layers = [layer[name] for _, layer in sorted(self._layers.items())]
        recorded = [values for values in layers if values is not None]
        if not recorded:
            raise GatelensError("nothing was recorded: run a sparse model in record_open, with edges=True for edges.")
        return torch.stack([values.to(recorded[0].device) for values in recorded])


@contextmanager
def record_open(hf: Any, edges: bool = False, first: bool = False) -> Iterator[OpenRecord]:
    """Inside, every forward pass of a sparse model leaves the number of open edges in the record.

    Arguments:
        edges: record the gates themselves too, in memory quadratic in the sequence length.
        first: record the gates of edges to the first key too. The gates of one layer at a time are in memory.

    Example:
        with torch.no_grad(), record_open(model.hf) as record:
            model.hf(input_ids=tokens)
        keys_per_query = record.open_keys.sum() / (record.visible_keys > 0).sum()
    """
    record = OpenRecord(edges, first)
    with _set_on_modules(hf, "gate_record", record):
        yield record


@contextmanager
def sequence_noise(hf: Any, seeds: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside, the gates of each sequence of a batch are sampled from the sequence's own seed, integers of 0 or more.

    So they do not depend on what else is in the batch, on the device, or on what was sampled before.
    """
    with _set_on_modules(hf, "gate_seeds", seeds):
        yield


@contextmanager
def straight_through(hf: Any) -> Iterator[None]:
    """Inside, gradients pass through the gates of a sparse model in evaluation mode too, as if A were sigmoid(l)."""
    with _set_on_modules(hf, "gate_straight_through", True):
        yield


@contextmanager
def gate_temperature(hf: Any, temperature: float) -> Iterator[None]:
    """Inside, the gate logits of a sparse model are divided by this temperature; see `gated_attention`."""
    with _set_on_modules(hf, "gate_temperature", temperature):
        yield


@contextmanager
def _set_on_modules(hf: Any, name: str, value: Any) -> Iterator[None]:
    modules = attention_modules(hf)
    for module in modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, name)


def generators(module: Any) -> list[torch.Generator] | None:
    """The random generators of an attention module, one for each sequence, inside `sequence_noise`."""
    seeds = getattr(module, "gate_seeds", None)
    if seeds is None:
        return None
    mixed = [int(np.random.SeedSequence([*seed, module.layer_idx]).generate_state(1)[0]) for seed in seeds]
    return [torch.Generator().manual_seed(seed) for seed in mixed]

"""A model: the untouched Hugging Face causal LM, its tokenizer, and where its parts are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gatelens.errors import GatelensError
from gatelens.model.anatomy import Anatomy, Head


@dataclass(frozen=True, eq=False)
class Model:
    """What :func:`gatelens.load` returns and everything else takes.

    ``hf`` is the Hugging Face model as its own library loaded it: in evaluation mode, with frozen weights.
    ``source`` is what :func:`gatelens.load` opens as this model from any folder: a whole path, a hub id or a built-in
    name; empty where the model was not loaded.
    """

    name: str
    hf: Any
    tokenizer: Any
    anatomy: Anatomy
    source: str = ""

    @property
    def n_layers(self) -> int:
        return self.anatomy.n_layers

    @property
    def n_heads(self) -> int:
        """Heads in each layer (query heads, where keys and values are shared between them)."""
        return self.anatomy.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.anatomy.n_kv_heads

    @property
    def device(self) -> torch.device:
        """Where tokens go in. With a device map the layers may live elsewhere."""
        return self.hf.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def wide_dtype(self) -> torch.dtype:
        """What scores and differences are kept in: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.hf.parameters())

    @property
    def context(self) -> int:
        """The longest sequence the model was made for."""
        return int(self.hf.config.max_position_embeddings)

    def check_head(self, head: Head) -> Head:
        """The head itself, if this model has it."""
        if not (0 <= head.layer < self.n_layers and 0 <= head.index < self.n_heads):
            raise GatelensError(
                f"no head {head} in {self.name}: layers run 0-{self.n_layers - 1}, heads 0-{self.n_heads - 1}. "
                f"`gatelens inspect {self.name}` lists them."
            )
        return head

    @cached_property
    def fingerprint(self) -> str:
        """A hash that tells this model from others, whatever folder it lies in: config, shapes and weights.

        64 numbers spread over each weight are hashed, so that it takes no time for a large model; training
        moves practically all of them.
        """
        config = self.hf.config.to_dict()
        for key in (
            "transformers_version",
            "_name_or_path",
            "dtype",
            "architectures",
        ):  # how it was stored, not what it is
            config.pop(key, None)
        return hash_weights(self.hf, json.dumps(config, sort_keys=True, default=str))

    def __repr__(self) -> str:
        return (
            f"Model({self.name}: {self.anatomy.model_type}, {self.n_layers} layers x {self.n_heads} heads, "
            f"{self.n_parameters:,} parameters, {self.dtype}, {self.device})"
        )


def hash_weights(hf: Any, more: str = "") -> str:
    """A hash of a Hugging Face model's shapes, dtypes and weights, 64 numbers of each, and of ``more``."""
    digest = hashlib.sha256(more.encode())
    for name, weight in sorted(hf.state_dict().items()):
        sample = weight.flatten()[:: max(1, weight.numel() // 64)][:64]
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()

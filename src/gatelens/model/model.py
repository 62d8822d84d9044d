"""A model: the unchanged Hugging Face causal LM, its tokenizer, and where its parts are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.anatomy import Anatomy
from gatelens.model.components import Head
from gatelens.runtime.late import late

# Config fields that say how a model was stored, not what it computes.
_STORAGE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "architectures")


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded causal LM: what `gatelens.load` returns and every other function takes.

    Arguments:
        name: the name to print: a built-in name, a hub id, or the last part of a path.
        hf: the Hugging Face model as transformers loaded it, in evaluation mode and with frozen weights.
        tokenizer: the Hugging Face tokenizer.
        anatomy: the parts of the model, from `gatelens.model.anatomy.describe`.
        source: what `gatelens.load` takes to open this model from any working directory: a built-in name, a hub id or
            an absolute path. It is empty if the model was not loaded by `gatelens.load`.

    Example:
        >>> model = gatelens.load("smollm2")
        >>> model.n_layers, model.n_heads, model.n_kv_heads
        (30, 9, 3)
    """

    name: str
    hf: Any
    tokenizer: Any
    anatomy: Anatomy
    source: str = ""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.anatomy.n_layers

    @property
    def n_heads(self) -> int:
        """Number of query heads in each layer."""
        return self.anatomy.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Number of key-value heads in each layer; fewer than `n_heads` with grouped-query attention."""
        return self.anatomy.n_kv_heads

    @property
    def device(self) -> torch.device:
        """The device that input tokens go to. With a device map, layers may be on other devices."""
        return self.hf.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.hf.dtype

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype that scores and differences are computed in: float32, or float64 for a float64 model."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.hf.parameters())

    @property
    def context(self) -> int:
        """The longest sequence that the model was made for, in tokens."""
        return int(self.hf.config.max_position_embeddings)

    def check_head(self, head: Head) -> Head:
        """Return the head if this model has it; otherwise raise a `GatelensError` that says which heads exist."""
        if not (0 <= head.layer < self.n_layers and 0 <= head.index < self.n_heads):
            raise GatelensError(
                f"no head {head} in {self.name}: layers run 0-{self.n_layers - 1}, heads 0-{self.n_heads - 1}. "
                f"`gatelens inspect {self.name}` lists them."
            )
        return head

    # Interventions: everything below runs plain `model.hf`, and leaves no hook behind.

    def ablate(self, parts: Any, source: Any = "zero", *, on: Any = None) -> AbstractContextManager[None]:
        """Switch parts of the model off: inside the block, every call of ``hf`` and ``hf.generate`` runs without them.

        Arguments:
            parts: heads (``"L3H7"``, ``(3, 7)``), edges (``"L3H7 -> L5H2.q"``), other components (``"M3"``), a list of
                them, or a circuit.
            source: what they are replaced by: ``"zero"``; ``"mean"``, the mean over ``on``; or a run (`capture`), whose
                values are read position by position. Positions after the end of the run are not changed.
            on: what the mean is taken over: a text, several texts, tokens, or a task (its corrupt prompts).

        Example:
            with model.ablate(["L9H6", "L9H9"], source="mean", on=task):
                print(model.generate("When Mary and John went to the store, John gave a drink to"))

        Cost: nothing for heads; about 1 forward more for edges and other components.
        """
        context: AbstractContextManager[None] = late("gatelens.gates.interventions:ablate")(self, parts, source, on=on)
        return context

    def keep(self, parts: Any, source: Any = "zero", *, on: Any = None) -> AbstractContextManager[None]:
        """Switch everything off but these parts. The arguments are those of `ablate`.

        Of a circuit of heads, the embedding and the MLPs stay as they are. Of a circuit of edges, all other edges are
        closed.

        Example:
            with model.keep(gatelens.attribute_heads(model, task).circuit(20), source="mean", on=task):
                print(model.generate("When Mary and John went to the store, John gave a drink to"))
        """
        context: AbstractContextManager[None] = late("gatelens.gates.interventions:keep")(self, parts, source, on=on)
        return context

    def patch(self, parts: Any, run: Any, *, positions: Iterable[int] | None = None) -> AbstractContextManager[None]:
        """Let parts of the model read another run, position by position.

        Arguments:
            parts: as for `ablate`.
            run: the other run, from `capture`. A run of one prompt serves every prompt of a batch.
            positions: change these positions only, counted from 0; by default all positions that the run has.

        Example:
            other = model.capture("When Anna and Paul went to the store, Paul gave a drink to")
            with model.patch("L9H6", other):
                print(model.generate("When Mary and John went to the store, John gave a drink to"))
        """
        interventions: Any = late("gatelens.gates.interventions:patch")
        context: AbstractContextManager[None] = interventions(self, parts, run, positions=positions)
        return context

    def capture(self, text: str | Tensor) -> Any:
        """Run a text, or tokens (prompt, position), and capture its logits and the outputs of all heads and layers.

        Returns:
            A `Run`, which `ablate`, `keep` and `patch` take. Cost: 1 forward.

        Example:
            run = model.capture("When Anna and Paul went to the store, Paul gave a drink to")
            run.heads[3].shape  # the outputs of the heads of layer 3: (prompt, position, head, dim)
        """
        return late("gatelens.gates.interventions:capture_text")(self, text)

    def generate(self, text: str | Sequence[str], max_new_tokens: int = 20, **options: Any) -> Any:
        """Continue a text with ``hf.generate``: greedily, unless the options say otherwise.

        Arguments:
            text: a text, or several, which are continued one after the other.
            max_new_tokens: how many tokens to add at most.
            options: further arguments of ``hf.generate``, such as ``do_sample=True``.

        Returns:
            The added text, without the given one; a list of them if several texts are given.

        Example:
            model.generate("When Mary and John went to the store, John gave a drink to", max_new_tokens=5)
        """
        return late("gatelens.gates.interventions:generate")(self, text, max_new_tokens, **options)

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 hash of the config and the weights: equal for copies of a model, different after any training.

        Only 64 numbers of each weight are hashed, so that it is fast for a large model too.
        """
        config = self.hf.config.to_dict()
        for field in _STORAGE_FIELDS:
            config.pop(field, None)
        return hash_weights(self.hf, json.dumps(config, sort_keys=True, default=str))

    def identity(self) -> dict[str, str]:
        """What identifies the model in the request of a run: its name, its fingerprint and its dtype."""
        return {"name": self.name, "fingerprint": self.fingerprint, "dtype": str(self.dtype)}

    def __repr__(self) -> str:
        return (
            f"Model({self.name}: {self.anatomy.model_type}, {self.n_layers} layers x {self.n_heads} heads, "
            f"{self.n_parameters:,} parameters, {self.dtype}, {self.device})"
        )


def hash_weights(hf: Any, prefix: str = "") -> str:
    """Hash the weights of a Hugging Face model.

    Arguments:
        hf: the model.
        prefix: text that is hashed before the weights.

    Returns:
        A SHA-256 hash, in hexadecimal, of the name, shape and dtype of every weight and of 64 numbers spread over it.
    """
    digest = hashlib.sha256(prefix.encode())
    for name, weight in sorted(hf.state_dict().items()):
        sample = weight.flatten()[:: max(1, weight.numel() // 64)][:64]
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()

"""What an intervention needs to know in a forward pass that it did not start: where the tokens of the pass stand.

`gatelens.gates.interventions` changes a Hugging Face model while the user calls it. With a key-value cache a pass reads
only the new tokens, so what closed gates read has to be looked up by position.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.component_runs import Components
from gatelens.gates.edge_runs import EdgeRun
from gatelens.gates.hooks import Edit, Hooks
from gatelens.model import Model
from gatelens.model.graph import Graph


class Places:
    """The positions of the tokens in the forward pass that is under way: (prompt, position) int64.

    Positions count the real tokens of a prompt from 0, also after padding on the left and with a key-value cache.
    """

    def __init__(self, model: Model, hooks: Hooks) -> None:
        self.now = torch.zeros(1, 1, dtype=torch.int64)
        self._signature = inspect.signature(model.hf.forward)
        hooks.callback(model.hf.register_forward_pre_hook(self._look, with_kwargs=True).remove)

    def _look(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        tokens = given.get("input_ids")
        shape = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
        positions, mask, cache = (given.get(name) for name in ("position_ids", "attention_mask", "past_key_values"))
        if positions is None and isinstance(mask, Tensor) and mask.ndim == 2:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -shape[1] :]
        elif positions is None:
            past = 0 if cache is None else int(cache.get_seq_length())
            positions = past + torch.arange(shape[1])[None]
        self.now = positions.expand(shape)

    def known(self, n_positions: int, chosen: Tensor | None = None) -> Tensor:
        """Where a run of this many positions has a value, and a chosen position stands: bool (prompt, position)."""
        known = self.now < n_positions
        return known if chosen is None else known & torch.isin(self.now, chosen.to(self.now.device))

    def pick(self, values: Tensor) -> Tensor:
        """Values of a run (..., prompt, position, width) at the positions of this pass; the last ones beyond its end.

        A run of one prompt serves every prompt of the pass.
        """
        n_prompts, n_positions = values.shape[-3:-1]
        if n_prompts not in (1, len(self.now)):
            raise GatelensError(
                f"the run that closed gates read has {n_prompts} prompts, and this pass has {len(self.now)}: capture a "
                "run of one prompt, which serves every prompt, or of these prompts."
            )
        at = self.now.clamp(max=n_positions - 1).to(values.device)
        prompts = torch.arange(len(at), device=values.device)[:, None] if n_prompts > 1 else torch.zeros_like(at)
        return values[..., prompts, at, :]


def replace_heads(closed: Tensor, values: Tensor | None, places: Places, positions: Tensor | None) -> Edit:
    """Replace the outputs of some heads of one layer.

    Arguments:
        closed: bool (head,), the heads.
        values: what they read: a mean (head, dim), the outputs in a run (prompt, position, head, dim), or None for 0.
        positions: if given, only these positions are changed.
    """

    def edit(z: Tensor) -> Tensor:
        own = z.unflatten(-1, (len(closed), -1))
        where = closed.to(z.device)[:, None].expand(own.shape[-2:])
        if values is None:
            new = torch.zeros_like(own)
        elif values.ndim == 2:
            new = values.to(own).expand_as(own)
        else:
            new = places.pick(values.flatten(2)).to(own).view_as(own)
        n_positions = values.shape[1] if values is not None and values.ndim == 4 else torch.iinfo(torch.int64).max
        known = places.known(n_positions, positions).to(z.device)
        return torch.where(where & known[..., None, None], new, own).flatten(-2)

    return edit


class LiveEdges:
    """Gates on edges in every forward pass that the user makes.

    Arguments:
        gates: (source, destination), 1 for an open edge.
        reference: what closed edges read: the components of a run (prompt, position), or one value (1, 1) for all
            prompts and positions.
        constant: whether the reference is such a value.
        positions: if given, only these positions are changed.
    """

    def __init__(
        self, model: Model, gates: Tensor, reference: Components, *, constant: bool, positions: Tensor | None
    ) -> None:
        self.reference, self.constant, self.positions = reference, constant, positions
        self.run = EdgeRun(model, Graph.of(model.anatomy), gates[None], reference, None)
        self.model = model

    def hook(self, hooks: Hooks, places: Places) -> None:
        """Register the hooks."""

        def begin(stream: Tensor) -> None:
            self.run.reference = self._reference(places)
            everywhere = self.constant and self.positions is None
            n_positions = torch.iinfo(torch.int64).max if self.constant else self.reference.final.shape[1]
            self.run.known = None if everywhere else places.known(n_positions, self.positions)
            self.run.begin(*stream.shape[:2])

        hooks.before(self.model.anatomy.blocks[0].layer, begin)
        self.run.hook(hooks)

    def _reference(self, places: Places) -> Components:
        whole = self.reference

        def at(values: Tensor) -> Tensor:
            if self.constant:
                return values.expand(*values.shape[:-3], *places.now.shape, -1)
            return places.pick(values)

        def each(layers: Sequence[Tensor]) -> list[Tensor]:
            return [at(layer) for layer in layers]

        return replace(
            whole,
            sources=at(whole.sources),
            attention_inputs=each(whole.attention_inputs),
            mlp_inputs=each(whole.mlp_inputs),
            final=at(whole.final),
            logits=whole.logits[:1].expand(len(places.now), -1),  # which nothing reads
        )

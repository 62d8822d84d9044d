"""What a head writes, read directly as logits: its contribution through the final norm and the unembedding.

The contribution of a head at the last position is z W_O. With the scale that the final norm has in the same run, the
logits are a sum over the contributions of all components, so each head has its share of every logit. Later layers that
read the head are not counted. Only differences between tokens have a meaning, so the mean over the vocabulary is
subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gatelens.gates.hooks import Edit, Hooks
from gatelens.gates.runs import forward
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.runtime.precision import widen


@dataclass(frozen=True, eq=False)
class DirectWrites:
    """What some heads write at the last position, after the final norm."""

    normed: Float[Tensor, "prompt head width"]
    unembed: Shaped[Tensor, "vocab width"]  # the model's own

    def of_tokens(self, ids: Int[Tensor, "prompt choice"]) -> Float[Tensor, "prompt head choice"]:
        """Direct logits of some tokens of each prompt, minus their mean over the vocabulary; NaN where the id is -1."""
        mean = self.unembed.mean(0, dtype=self.normed.dtype)
        rows = self.unembed[ids.clamp(min=0).to(self.unembed.device)].to(self.normed) - mean.to(self.normed)
        logits = torch.einsum("phw,pcw->phc", self.normed, rows)
        return logits.masked_fill((ids < 0)[:, None].to(logits.device), torch.nan)

    def top(self, k: int) -> Int[Tensor, "prompt head k"]:
        """The ids of the k tokens with the largest direct logits, largest first."""
        return (self.normed.to(self.unembed) @ self.unembed.T).topk(k).indices


@torch.no_grad()
def direct_writes(model: Model, tokens: Int[Tensor, "prompt position"], heads: Sequence[Head]) -> DirectWrites:
    """What these heads write at the last position of each prompt. Cost: 1 forward."""
    anatomy = model.anatomy
    cut = (model.n_heads, anatomy.head_dim)
    outputs: dict[int, Tensor] = {}
    finals: list[Tensor] = []

    def keep(layer: int) -> Edit:
        def edit(z: Tensor) -> None:
            outputs[layer] = z[:, -1].unflatten(-1, cut)

        return edit

    with Hooks() as hooks:
        for layer in sorted({head.layer for head in heads}):
            hooks.before(anatomy.blocks[layer].out, keep(layer))
        hooks.before(anatomy.final_norm.part, lambda stream: finals.append(widen(stream[:, -1])))
        forward(model, tokens, None, hooks, "last")
    scale = anatomy.final_norm.scale(finals[0])
    by_layer = {layer: widen(anatomy.contributions(anatomy.blocks[layer], z)) for layer, z in outputs.items()}
    written = torch.stack([by_layer[head.layer][head.index].to(scale) for head in heads], 1)
    if anatomy.final_norm.kind.centred:
        written = written - written.mean(-1, keepdim=True)
    return DirectWrites(written * scale[:, None], anatomy.unembed.weight)  # type: ignore[arg-type]

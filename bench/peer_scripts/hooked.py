"""The jobs of both versions of TransformerLens, whose hooks have the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from serve import clean, corrupt, heads, metric

names = [f"blocks.{layer}.attn.hook_z" for layer in range(12)]


def hooked_jobs(model: Any) -> dict[str, Callable[[], Any]]:
    """Patching of heads one at a time, and attribution of all heads."""

    @torch.no_grad()
    def patch() -> torch.Tensor:
        _, other = model.run_with_cache(corrupt, names_filter=lambda name: name in names)
        base = metric(model(clean))
        scores = torch.zeros(len(heads))
        for number, (layer, head) in enumerate(heads):

            def put(z: torch.Tensor, hook: Any, layer: int = layer, head: int = head) -> torch.Tensor:
                z[:, :, head] = other[names[layer]][:, :, head]
                return z

            logits = model.run_with_hooks(clean, fwd_hooks=[(names[layer], put)])
            scores[number] = (base - metric(logits)).mean()
        return scores

    def attribute() -> torch.Tensor:
        with torch.no_grad():
            _, other = model.run_with_cache(corrupt, names_filter=lambda name: name in names)
        values: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Callable[..., torch.Tensor]:  # version 4 gives its hooks other names
            def hook(z: torch.Tensor, hook: Any) -> torch.Tensor:
                values[name] = z if z.requires_grad else z.requires_grad_()
                return values[name]

            return hook

        with model.hooks(fwd_hooks=[(name, keep(name)) for name in names]):
            total = metric(model(clean)).sum()
        grads = torch.autograd.grad(total, [values[name] for name in names])
        scores = [((values[n] - other[n]) * grad).sum((0, 1, 3)) for n, grad in zip(names, grads, strict=True)]
        return torch.stack(scores) / len(clean)

    return {"patch heads": patch, "attribute heads": attribute}

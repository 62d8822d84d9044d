"""LayerNorm and RMSNorm with the closed form of their backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gatelens.model.families import NormKind
from gatelens.runtime.precision import widen


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of a model.

    Arguments:
        module: the model's own module, or None where the family has no norm; the norm is then the identity.
        kind: how the module computes its output.
    """

    module: nn.Module | None
    kind: NormKind

    @property
    def part(self) -> nn.Module:
        """The module, for norms that exist in every family, such as the final norm."""
        assert self.module is not None
        return self.module

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.module is None else self.module(x)

    def scale(self, x: Tensor) -> Tensor:
        """The factor that multiplies the centred input, weights included: (..., width). Ones if there is no norm."""
        if self.module is None:
            return torch.ones_like(x)
        weight = getattr(self.module, "weight", None)
        inverse = self._inverse(widen(x))
        return inverse.expand_as(x) if weight is None else inverse * (widen(weight) + self.kind.weight_offset)

    def with_held_scale(self) -> Callable[[Tensor], Tensor]:
        """A forward for the module with the same values, whose gradient treats the scale as a constant."""
        forward = self.part.forward

        def held(x: Tensor) -> Tensor:
            with torch.no_grad():
                output, scale = forward(x), self.scale(x).to(x.dtype)
            linear = (x - x.mean(-1, keepdim=True) if self.kind.centred else x) * scale
            return output + (linear - linear.detach())  # the bracket is 0 and carries the gradient

        return held

    def pull_back(self, grads: Tensor, x: Tensor, *, hold: bool = False) -> Tensor:
        """Turn gradients at the norm's output into gradients at its input.

        With y = w (x - mean) / s, the gradient at the input is ``(v - mean(v) - x' mean(v x')) / s``, where v is w
        times the gradient at the output and x' is the normed input. RMSNorm has no means.

        Arguments:
            grads: (k, ..., width), k gradients for each input; changed in place.
            x: (..., width), the input.
            hold: treat the scale s as a constant; the last term is then left out.

        Returns:
            (k, ..., width), the tensor ``grads``.
        """
        if self.module is None:
            return grads
        weight = getattr(self.module, "weight", None)
        if weight is not None:
            grads *= widen(weight).to(grads.device) + self.kind.weight_offset
        x = widen(x)
        inverse = self._inverse(x)
        if self.kind.centred:
            x = x - x.mean(-1, keepdim=True)
            grads -= grads.mean(-1, keepdim=True)
        if not hold:
            normed = x * inverse
            along = torch.einsum("k...d,...d->k...", grads, normed) / x.shape[-1]
            grads.addcmul_(along.unsqueeze(-1), normed, value=-1)
        grads *= inverse
        return grads

    def _inverse(self, x: Tensor) -> Tensor:
        eps = getattr(self.module, "eps", getattr(self.module, "variance_epsilon", 1e-5))
        if self.kind.centred:
            x = x - x.mean(-1, keepdim=True)
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

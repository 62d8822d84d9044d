"""Losses of a batch in nats per predicted token, one number for each sequence."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy(
    log_probs: Float[Tensor, "sequence token vocab"], tokens: Int[Tensor, "sequence token"]
) -> Float[Tensor, " sequence"]:
    """The mean negative log-probability of each token given the tokens before it; the first token is not predicted."""
    picked = log_probs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return -picked.mean(-1)


def kl_divergence(
    dense: Float[Tensor, "sequence token vocab"], sparse: Float[Tensor, "sequence token vocab"]
) -> Float[Tensor, " sequence"]:
    """KL(dense || sparse) of the next token's distribution, mean over tokens; 0 where both models agree.

    Arguments:
        dense, sparse: log-probabilities.
    """
    return F.kl_div(sparse, dense, reduction="none", log_target=True).sum(-1).mean(-1)

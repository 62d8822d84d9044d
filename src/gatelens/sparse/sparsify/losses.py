"""Losses of a batch, in nats per predicted token, one number for each row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """How badly each token is predicted from those before it: (row,), mean over all tokens but the first.

    log_probs: (row, token, vocabulary); tokens: (row, token).
    """
    picked = log_probs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return -picked.mean(-1)


def kl_divergence(dense: Tensor, sparse: Tensor) -> Tensor:
    """KL(dense || sparse) of the next token's distribution: (row,), mean over tokens; 0 where they agree.

    Both are log-probabilities (row, token, vocabulary).
    """
    return F.kl_div(sparse, dense, reduction="none", log_target=True).sum(-1).mean(-1)

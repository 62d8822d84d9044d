"""Losses of a batch in nats per predicted token, one number for each sequence.

Logits of all tokens over the whole vocabulary are the largest tensors of a training step. They are read in chunks of a
few tokens, so that nothing else of their size is ever in memory but their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 20  # logits of a chunk; they stay in a processor's cache
NO_LABEL = -100  # the token that follows the last one is not known


class Losses(NamedTuple):
    """The losses of each sequence; `kl` and `cross_entropy` have gradients."""

    kl: Float[Tensor, " sequence"]
    """KL(dense || sparse) of the next token's distribution, mean over tokens; 0 where both models agree."""
    cross_entropy: Float[Tensor, " sequence"]
    """The mean negative log-probability of each token but the first, given the tokens before it."""
    dense_cross_entropy: Float[Tensor, " sequence"]


def losses(
    sparse: Float[Tensor, "sequence token vocab"],
    dense: Float[Tensor, "sequence token vocab"],
    tokens: Int[Tensor, "sequence token"],
) -> Losses:
    """KL divergence and cross-entropy of each sequence, computed in float32.

    Arguments:
        sparse, dense: logits of the two models, in any precision.
    """
    labels = next_tokens(tokens).flatten()
    kl, ce, dense_ce = _TokenLosses.apply(sparse.flatten(0, 1), dense.flatten(0, 1), labels)  # type: ignore[no-untyped-call]
    by_sequence = [x.view_as(tokens) for x in (kl, ce, dense_ce)]
    return Losses(by_sequence[0].mean(-1), *(x.sum(-1) / (tokens.shape[1] - 1) for x in by_sequence[1:]))


class _TokenLosses(torch.autograd.Function):
    """(token, vocab) logits of both models and (token,) labels -> KL, cross-entropy, dense cross-entropy of each token.

    With q and p the distributions of the sparse and the dense model, the gradients by the sparse logits are q - p for
    the KL, and q - 1[label] for the cross-entropy.
    """

    @staticmethod
    def forward(ctx: Any, sparse: Tensor, dense: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kl, ce, dense_ce, log_sum, dense_log_sum = torch.zeros(5, len(labels), device=sparse.device).unbind()
        for rows in chunks(sparse):
            s, d = sparse[rows].float(), dense[rows].float()
            log_sum[rows], dense_log_sum[rows] = s.logsumexp(-1), d.logsumexp(-1)
            label, known = labels[rows].clamp(min=0)[:, None], (labels[rows] >= 0).float()
            ce[rows] = (log_sum[rows] - s.gather(1, label)[:, 0]) * known
            dense_ce[rows] = (dense_log_sum[rows] - d.gather(1, label)[:, 0]) * known
            p = torch.exp(d - dense_log_sum[rows, None])
            kl[rows] = p.mul_(d - s).sum(-1) - dense_log_sum[rows] + log_sum[rows]
        ctx.save_for_backward(sparse, dense, labels, log_sum, dense_log_sum)
        ctx.mark_non_differentiable(dense_ce)
        return kl, ce, dense_ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkl: Tensor, dce: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        sparse, dense, labels, log_sum, dense_log_sum = ctx.saved_tensors
        dce = dce * (labels >= 0)
        dsparse = torch.empty_like(sparse)
        for rows in chunks(sparse):
            gradient = (sparse[rows].float() - log_sum[rows, None]).exp_().mul_((dkl + dce)[rows, None])
            p = (dense[rows].float() - dense_log_sum[rows, None]).exp_()
            gradient.addcmul_(p, dkl[rows, None], value=-1)
            gradient.scatter_add_(1, labels[rows].clamp(min=0)[:, None], -dce[rows, None])
            dsparse[rows] = gradient
        return dsparse, None, None


def next_tokens(tokens: Int[Tensor, "sequence token"]) -> Int[Tensor, "sequence token"]:
    """The token that follows each token, and `NO_LABEL` for the last one of a sequence."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], NO_LABEL)], 1)


def chunks(logits: Float[Tensor, "token vocab"]) -> Iterator[slice]:
    """Parts of the tokens whose logits are read at a time."""
    step = max(1, CHUNK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))
